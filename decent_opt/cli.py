"""The command `decent-opt`. Typer and rich are imported here and in `config_cli`, nowhere else in the library."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from decent_opt import config_cli
from decent_opt._version import __version__

app = typer.Typer(
    name="decent-opt",
    help="Decentralised, communication-efficient training for PyTorch.",
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

app.add_typer(config_cli.app, name="config")


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


@app.command()
def compressors(
    specs: Annotated[
        list[str] | None, typer.Argument(help="Only these: sign, topk:share=0.1,block=256 ... Default: all.")
    ] = None,
    elements: Annotated[
        int, typer.Option("--elements", min=1024, help="Length of the vector that is timed.")
    ] = 4_194_304,
) -> None:
    """List the compressors of CPD-SGDM and of the DDP hook: what they promise, and how fast they are here.

    delta, omega and bits are those of a 1024 x 1024 matrix in float32. Speeds are measured on one thread, as a ratio to
    copying the vector: 0.5 takes twice as long as a copy.
    """
    from decent_opt import compressors_cli
    from decent_opt.errors import ConfigError

    try:
        Console().print(compressors_cli.table(specs, elements))
    except ConfigError as error:
        typer.echo(f"decent-opt: {error}", err=True)
        raise typer.Exit(2) from None


topology_app = typer.Typer(
    help="Graphs: who mixes with whom, how fast that mixes, and what it costs.", no_args_is_help=True
)
app.add_typer(topology_app, name="topology")


@topology_app.command("list")
def list_topologies() -> None:
    """Show the names that a topology can have, and their options."""
    from decent_opt.options import REQUIRED
    from decent_opt.topology.factory import NAMED

    table = _table(
        'topologies: NAME or NAME:option=value,option=value (a torus also: "torus:4x8")', "name", "what it is"
    )
    table.add_column("options", overflow="fold")
    for name, named in NAMED.items():
        options = [(o.key, o.allowed, "needed" if o.default is REQUIRED else o.default) for o in named.options]
        lines = [f"{key}: {allowed}" + f" [{default}]" * (default is not None) for key, allowed, default in options]
        table.add_row(name, named.about, escape("\n".join(lines)))
    Console().print(table)


@topology_app.command("show")
def show_topology(
    name: Annotated[str, typer.Argument(help="A name, with options after a colon: ring, torus:4x8, base:k=1 ...")],
    size: Annotated[int, typer.Option("--size", "-n", min=1, help="How many workers.")],
    model: Annotated[
        str | None,
        typer.Option("--bytes", metavar="MODEL_BYTES", help="Size of the model's parameters: 500000000, 500MB, 1.2GB."),
    ] = None,
    round: Annotated[int, typer.Option("--round", min=0, help="Which round's W to print.")] = 0,
    png: Annotated[Path | None, typer.Option("--png", help="Also draw the graph into this file (matplotlib).")] = None,
) -> None:
    """Show the mixing matrix, how fast it mixes, the bytes of a round, and a drawing of the graph."""
    from decent_opt.errors import ConfigError
    from decent_opt.topology import drawing, make_topology, report

    try:
        model_bytes = None if model is None else _bytes(model)
        topology = make_topology(name, size)
        table = _table(f"{topology.name}, {size} worker{'s' * (size > 1)}", "what", "found")
        for what, value in report.rows(report.facts(topology), model_bytes):
            table.add_row(what, value)
        Console().print(table)
        of_round = f" of round {round % topology.period}" if topology.period > 1 else ""
        if size <= report.READABLE:
            typer.echo(f"\nW{of_round} (row = who receives)\n{report.weights_text(topology, round)}\n")
            for r in range(topology.period if topology.period > 1 else 0):
                typer.echo(f"round {r}: {report.links_text(topology, r)}")
            typer.echo(f"\n{drawing.draw(topology)}")
        else:
            typer.echo(f"W and the drawing are shown for up to {report.READABLE} workers; --png FILE draws any number.")
        if png is not None:
            drawing.save_png(topology, png)
            typer.echo(f"\ndrawn into {png}")
    except ConfigError as error:
        typer.echo(f"decent-opt: {error}", err=True)
        raise typer.Exit(2) from None


def _bytes(text: str) -> int:
    from decent_opt.errors import ConfigError

    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kMGT]?)B?", text.strip())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"bytes: must be a positive number, with kB, MB, GB or TB if you like, got {text!r}")
    return int(float(match[1]) * 1000 ** " kMGT".index(match[2] or " "))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", min_width=60)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


if __name__ == "__main__":
    app()
