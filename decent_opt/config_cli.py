"""`decent-opt config ...`: the schema of a configuration file, and a check of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Configuration files: their schema, and a check of one.", no_args_is_help=True)


@app.command()
def schema() -> None:
    """Print the JSON schema of a configuration file, for editors and other tools."""
    from decent_opt.config import DecentConfig  # imports pydantic, which `--help` can do without

    typer.echo(json.dumps(DecentConfig.json_schema(), indent=2))


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="A JSON or YAML file.", show_default=False)],
    size: Annotated[
        int | None,
        typer.Option("--size", "-n", min=1, help="Number of workers; with it the topology is checked, too."),
    ] = None,
) -> None:
    """Read a configuration file and print all options as they will be; exits with 2, and says why, if it cannot be."""
    from decent_opt.config import DecentConfig
    from decent_opt.errors import ConfigError

    try:
        config = DecentConfig.load(file)
        if size is not None:
            from decent_opt.topology import make_topology

            make_topology(config.topology, size)
    except ConfigError as error:
        typer.echo(f"decent-opt: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(json.dumps(config.model_dump(mode="json"), indent=2))
    if size is None:
        typer.echo("The topology is checked when the number of workers is known: --size N.", err=True)
