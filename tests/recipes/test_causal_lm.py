"""The recipe end to end at toy size: alone, on two ranks, and what it saves."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from decent_opt.recipes.causal_lm import Result, Settings, learning_rate, main, parse, train
from decent_opt.recipes.text import load_corpus
from decent_opt.testing import RankPool

TOY = Settings(
    layers=1, width=32, heads=2, context=16, batch=2, vocabulary=300, steps=12, period=4, lr=0.3, eval_every=4,
    eval_sample=256, eval_tokens=2048, device="cpu",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} green bottles, {i % 9} hanging on wall {i % 5}.\n" for i in range(1500)), "utf-8")
    return str(path)


def run(rank: int, settings: Settings, cache: Path) -> Result:
    corpus = load_corpus(settings.data, settings.vocabulary, cache=cache)
    result = train(settings, corpus, progress=None)
    for record in result.records:
        record.__dict__["distance"] = None  # tensors need not cross processes
    return result


def settings(file: str, **changes: object) -> Settings:
    return Settings(**{**TOY.__dict__, "data": (file,), **changes})


def loss_of_checkpoint(folder: Path, windows: torch.Tensor) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(input_ids=windows, labels=windows).loss)


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_alone_it_learns_and_saves(arch: str, file: str, tmp_path: Path, private_cache: Path) -> None:
    wanted = settings(file, arch=arch, output=str(tmp_path / "model"))
    result = run(0, wanted, private_cache)
    assert [step for step, _, _ in result.curve] == [0, 4, 8, 12]
    assert result.curve[0][1] == pytest.approx(math.log(300), rel=0.05)  # a new model knows nothing
    assert result.loss < 0.9 * result.curve[0][1]
    assert result.records == []
    assert result.bytes_sent() == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    corpus = load_corpus([file], 300, cache=private_cache)
    assert tokenizer("7 green bottles")["input_ids"] == corpus.tokenizer("7 green bottles")["input_ids"]
    assert loss_of_checkpoint(tmp_path / "model", corpus.validation_windows(16, 2048)) == pytest.approx(
        result.loss, abs=1e-4
    )


def test_two_ranks_gossip_and_save_the_consensus(
    ranks: RankPool, file: str, tmp_path: Path, private_cache: Path
) -> None:
    # Two local steps after the last round, so that there is something to average at the end.
    wanted = settings(file, steps=14, output=str(tmp_path / "model"), log_dir=str(tmp_path / "log"))
    results = ranks.run(run, 2, (wanted, private_cache))
    one, two = results
    assert one.loss == two.loss < 0.9 * one.curve[0][1]
    assert one.curve == two.curve
    assert one.distance == two.distance > 0
    windows = load_corpus([file], 300, cache=private_cache).validation_windows(16, 2048)
    assert loss_of_checkpoint(tmp_path / "model", windows) == pytest.approx(one.loss, abs=1e-4)
    for rank in range(2):
        lines = (tmp_path / "log" / f"rounds.{rank}.jsonl").read_text("utf-8").splitlines()
        assert [json.loads(line)["step"] for line in lines] == [4, 8, 12]
    # Three rounds of one message, which is the model and a header per bucket.
    assert 3 * 4 * one.parameters < one.bytes_sent() < 3 * 4 * one.parameters + 200
    assert one.bytes_sent(after=4) == pytest.approx(one.bytes_sent() * 2 / 3)


def test_all_reduce_equals_one_worker_with_both_batches(ranks: RankPool, file: str, private_cache: Path) -> None:
    wanted = settings(file, method="ddp", clip=0.0, steps=4)
    results = ranks.run(run, 2, (wanted, private_cache))
    assert results[0].loss == results[1].loss
    # 2 (n - 1) / n of the gradients at every step, and every trainable byte is in a bucket.
    assert results[0].bytes_sent() == 4 * 4 * results[0].parameters
    assert {record.step for record in results[0].records} == {1, 2, 3, 4}
    # A round after every step makes the same of plain SGD, as averaging parameters is averaging gradients then.
    gossip = ranks.run(run, 2, (settings(file, clip=0.0, steps=4, period=1, topology="complete"), private_cache))
    assert gossip[0].loss == pytest.approx(results[0].loss, abs=1e-4)


def test_adamw_averages_gradients_first(ranks: RankPool, file: str, private_cache: Path) -> None:
    wanted = settings(file, optimizer="adamw", lr=1e-2, warmup_steps=4)
    result = ranks.run(run, 2, (wanted, private_cache))[0]
    assert [record.kind for record in result.records] == ["gradient"] * 4 + ["gossip"] * 2
    assert result.loss < 0.9 * result.curve[0][1]


def test_the_command_line(file: str, tmp_path: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch,
                          capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(private_cache))
    sizes = {"layers": 1, "width": 32, "heads": 2, "context": 16, "vocabulary": 300, "steps": 3, "eval-every": 0}
    toy = [f"--{name}={value}" for name, value in sizes.items()]
    main([*toy, "--data", file, "--output", str(tmp_path / "first")])
    assert "1 workers, 3 steps" in capsys.readouterr().out
    main([*toy, "--data", file, "--model", str(tmp_path / "first"), "--lr", "0"])  # goes on from a saved model
    capsys.readouterr()
    with pytest.raises(SystemExit, match="causal_lm: data: no file matches 'nowhere'"):
        main([*toy, "--data", "nowhere"])
    with pytest.raises(SystemExit):
        parse(["--help"])
    described = capsys.readouterr().out
    assert "--warmup-steps" in described
    assert "(default: 0.5)" in described


def test_the_learning_rate_rises_and_falls() -> None:
    factors = [learning_rate(step, Settings(steps=100, ramp=0.1)) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[9] == factors[10] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[100] == pytest.approx(0.0, abs=1e-12)
