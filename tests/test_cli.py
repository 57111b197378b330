"""The command line: what it prints, and with which exit status it leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import decent_opt
from decent_opt import cli, doctor
from decent_opt._version import __version__
from decent_opt.cli import app
from decent_opt.topology import NAMES
from decent_opt.topology.report import in_bytes

runner = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"decent-opt {__version__}"
    assert decent_opt.__version__ == __version__


def test_without_a_command_it_prints_help() -> None:
    result = runner.invoke(app, [])
    assert result.exit_code == 0
    assert "Usage" in result.output
    assert "doctor" in result.output


def test_an_unknown_command_is_an_error() -> None:
    assert runner.invoke(app, ["docter"]).exit_code == 2


def test_doctor_reports_what_is_installed_and_that_averaging_works() -> None:
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for finding in doctor.packages():
        assert finding.name in result.output
        assert finding.value in result.output
    for word in ("gloo", "nccl", "mpi", "deepspeed", "horovod", "accelerate", "transformers"):
        assert word in result.output
    assert "averaged 0 and 1 to 0.5" in result.output


def test_doctor_averages_between_two_processes_over_gloo() -> None:
    result = runner.invoke(app, ["doctor", "--gloo"])
    assert result.exit_code == 0, result.output
    assert result.output.count("averaged 0 and 1 to 0.5") == 2


@pytest.mark.parametrize(
    ("found", "sentence"),
    [(None, "networkx is not installed"), ("1.9.2", "networkx 1.9.2 is too old, at least 2.5 is needed")],
)
def test_doctor_fails_in_a_sentence_when_a_package_is_missing_or_old(
    monkeypatch: pytest.MonkeyPatch, found: str | None, sentence: str
) -> None:
    real = doctor.installed_version
    monkeypatch.setattr(doctor, "REQUIRED", {"torch": (2, 11), "networkx": (2, 5)})
    monkeypatch.setattr(doctor, "installed_version", lambda name: found if name == "networkx" else real(name))
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert f"decent-opt: {sentence}" in result.stderr


def test_doctor_fails_in_a_sentence_without_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.dist, "is_available", lambda: False)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "no torch.distributed" in result.stderr


def test_doctor_fails_in_a_sentence_when_averaging_gives_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "average_of_ranks", float)  # every worker answers with its own rank
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "gave [0.0, 1.0], expected [0.5, 0.5]" in result.stderr


def test_doctor_goes_on_when_a_live_check_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(rank: int) -> float:
        raise OSError(f"no network on rank {rank}")

    monkeypatch.setattr(doctor, "average_of_ranks", broken)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "averaging over loopback between 2 workers failed: OSError: no network on rank" in result.stderr
    assert "integrations" in result.output


def test_an_integration_counts_as_shipped_when_its_module_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "FRAMEWORKS", {"ddp": "torch", "nosuch": "no-such-distribution"})
    ddp, nosuch = doctor.integrations()
    assert ddp.shipped
    assert ddp.installed is not None
    assert not nosuch.shipped
    assert nosuch.installed is None


def shown(*arguments: str) -> str:
    result = runner.invoke(app, ["topology", "show", *arguments])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_topology_list_shows_every_name_with_its_options() -> None:
    result = runner.invoke(app, ["topology", "list"])
    assert result.exit_code == 0
    for name in NAMES:
        assert f"│ {name} " in result.output
    for option in ("k: a whole number from 1 on [1]", "group: a whole number from 1 on [needed]", "rows x columns"):
        assert option in result.output


def test_topology_show_prints_the_numbers_the_matrix_and_a_drawing() -> None:
    text = shown("ring", "--size", "8", "--bytes", "1.2GB")
    for fact in ("worker and round) │ 2 │", "per round │ 0.19526 │", "│ 1.333 │", "disagreement │ 22 │"):
        assert fact in text
    assert "bytes sent per worker and round │ 2.4 GB │" in text
    assert "comparison │ 2.1 GB │" in text
    assert "W (row = who receives) 0 1 2 3 4 5 6 7 0 .333 .333 . . . . . .333" in text
    assert text.endswith("5 . . 3 . . . . . . . . . 4 .")  # the lower end of the ring, in dots


def test_topology_show_of_a_schedule_says_who_sends_to_whom_in_each_round() -> None:
    text = shown("one-peer-exponential", "-n", "3", "--round", "3")
    assert "period │ 2 rounds │" in text
    assert "W of round 1 (row = who receives) 0 1 2 0 .500 .500 . 1 . .500 .500 2 .500 . .500" in text
    assert "round 0: 0>1 1>2 2>0 round 1: 0>2 1>0 2>1" in text
    assert "round 0: 0-1 2-3 round 1: 0-2 1-3" in shown("one-peer-hypercube", "-n", "4")


def test_topology_show_gives_the_range_of_bytes_where_workers_differ() -> None:
    assert "│ 100 MB to 400 MB, mean 160 MB │" in shown("star", "-n", "5", "--bytes", "100000000")
    assert "round) │ 0 │" in shown("ring", "-n", "1")


@pytest.mark.parametrize("size", ["6", "100"])
def test_topology_show_draws_a_png(tmp_path: Path, size: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "graph.png"
    text = shown("base:k=2", "--size", size, "--png", str(file))
    assert ("W of round 0" in text) == (size == "6")
    assert ("shown for up to 16 workers" in text) == (size == "100")
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["rnig", "-n", "4"], "topology: unknown name 'rnig'; allowed are ring, complete"),
        (["torus", "-n", "7"], "topology: torus needs rows x columns workers with at least 2 of each, got the prime 7"),
        (["ring", "-n", "4", "--bytes", "many"], "bytes: must be a positive number, with kB, MB, GB or TB if you like"),
        (["ring", "-n", "4", "--bytes", "0"], "bytes: must be a positive number"),
        (
            ["ring", "-n", "4", "--png", "no/such/folder/graph.png"],
            "png: cannot write 'no/such/folder/graph.png' (No such",
        ),
    ],
)
def test_topology_show_refuses_in_a_sentence(arguments: list[str], sentence: str) -> None:
    result = runner.invoke(app, ["topology", "show", *arguments])
    assert result.exit_code == 2
    assert f"decent-opt: {sentence}" in result.stderr


def test_topology_show_says_what_a_png_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    result = runner.invoke(app, ["topology", "show", "ring", "-n", "3", "--png", str(tmp_path / "graph.png")])
    assert result.exit_code == 2
    assert "decent-opt: png: needs matplotlib, which is not installed" in result.stderr


@pytest.mark.parametrize(
    ("text", "count"), [("500", 500), ("500B", 500), ("1.5 kB", 1500), ("7GB", 7 * 10**9), ("2T", 2 * 10**12)]
)
def test_bytes_may_have_a_unit(text: str, count: int) -> None:
    assert cli._bytes(text) == count


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (12345, "12.3 kB"), (999_999, "1 MB"), (3.2e15, "3200 TB")]
)
def test_bytes_are_printed_in_a_unit_that_fits(count: float, text: str) -> None:
    assert in_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "release"),
    [("2.13.0+cpu", (2, 13)), ("2.11", (2, 11)), ("2.12.0a0+git1", (2, 12)), ("3.0rc1", (3, 0)), ("2", (2,))],
)
def test_release_numbers(text: str, release: tuple[int, ...]) -> None:
    assert doctor._release(text) == release


def test_the_library_does_not_import_typer_or_rich() -> None:
    # Compared with torch alone, which may import rich for its own reasons.
    code = "import sys, torch; before = set(sys.modules); import decent_opt, decent_opt.communication\n"
    code += "print(sorted({'typer', 'rich'} & (set(sys.modules) - before)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "[]"


def test_compressors_are_listed_with_their_laws_and_speeds() -> None:
    result = runner.invoke(app, ["compressors", "sign:chunk=2048", "int8", "--elements", "8192"])
    assert result.exit_code == 0
    assert "sign:chunk=2048" in result.output and "0.637" in result.output
    assert "omega 0.0159" in result.output
    assert "random-blocks" in runner.invoke(app, ["compressors", "--elements", "2048"]).output


def test_an_unknown_compressor_is_named_with_those_that_exist() -> None:
    result = runner.invoke(app, ["compressors", "sing"])
    assert result.exit_code == 2
    assert "compressor: allowed are identity, " in result.output and "did you mean 'sign'?" in result.output
