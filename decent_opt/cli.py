"""The command `decent-opt`. Typer and rich are imported here and nowhere else in the library."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from decent_opt._version import __version__

app = typer.Typer(
    name="decent-opt",
    help="Decentralised, communication-efficient training for PyTorch.",
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"decent-opt {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Decentralised, communication-efficient training for PyTorch."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def doctor(
    gloo: Annotated[
        bool, typer.Option("--gloo", help="Also let two real processes average a number over gloo (seconds).")
    ] = False,
) -> None:
    """Show what is installed, which backends and integrations work here, and run a live check.

    Exits with 1, and says why, when something that is needed is missing.
    """
    from decent_opt import doctor as report  # imports torch, which `--version` and `--help` can do without

    checks = [report.live_check("loopback")]
    if gloo:
        checks.append(report.live_check("gloo"))
    sections = {
        "packages": report.packages(),
        "devices": report.devices(),
        "backends": report.backends(),
        "live checks": checks,
    }
    console = Console()
    for title, findings in sections.items():
        table = _table(title, "what", "found")
        for finding in findings:
            table.add_row(finding.name, finding.value, style="bold red" if finding.problem else "")
        console.print(table)
    table = _table("integrations", "integration", "framework", "installed", f"in decent-opt {__version__}")
    for one in report.integrations():
        table.add_row(one.name, one.distribution, one.installed or "not installed", "yes" if one.shipped else "not yet")
    console.print(table)

    problems = [finding.problem for findings in sections.values() for finding in findings if finding.problem]
    for problem in problems:
        typer.echo(f"decent-opt: {problem}", err=True)
    if problems:
        raise typer.Exit(1)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", min_width=60)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


if __name__ == "__main__":
    app()
