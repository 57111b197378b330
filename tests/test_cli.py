"""The command line: what it prints, and with which exit status it leaves."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import decent_opt
from decent_opt import doctor
from decent_opt._version import __version__
from decent_opt.cli import app

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
