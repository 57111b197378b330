"""The demo's picture: loss against steps, and the same losses against the bytes that a worker had sent by then."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

# Told apart by everybody, also in grey (Okabe and Ito's palette, then repeated).
COLOURS = ("#000000", "#0072B2", "#D55E00", "#999999", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
STYLES: tuple[Any, ...] = ("--", "-", ":", "-.")


class Curve(Protocol):
    """What is drawn of a row."""

    @property
    def group(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def curve(self) -> list[tuple[int, float, int]]: ...  # (step, loss, bytes sent)


def draw(rows: Sequence[Curve], path: Path) -> None:
    """Save the picture: a colour for each method, a line style for each group."""
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(r.name for r in rows))}
    styles = {group: STYLES[i % len(STYLES)] for i, group in enumerate(dict.fromkeys(r.group for r in rows))}
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for row in rows:
        look: dict[str, Any] = {"color": colours[row.name], "linestyle": styles[row.group], "linewidth": 1.6}
        steps, losses, sent = zip(*row.curve, strict=True)
        by_step.plot(steps, losses, **look)
        if sent[-1]:
            by_bytes.plot([b / 1e6 for b in sent if b], [x for x, b in zip(losses, sent, strict=True) if b], **look)
        else:
            by_bytes.axhline(losses[-1], **look)  # its last loss, at any number of bytes
            place = {"xy": (0.01, losses[-1]), "xycoords": ("axes fraction", "data"), "va": "bottom"}
            by_bytes.annotate(f"{row.group}: sends nothing", **place, fontsize="small", color=look["color"])
    # The fall from an untrained model's loss would hide all the rest.
    by_step.set_ylim(top=0.1 + max(row.curve[min(1, len(row.curve) - 1)][1] for row in rows))
    by_step.set(xlabel="step", ylabel="validation loss")
    by_bytes.set(xlabel="MB sent per worker (log scale)", xscale="log")
    by_bytes.xaxis.set_major_formatter("{x:g}")
    for axes in (by_step, by_bytes):
        axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    lines = [Line2D([], [], color=colour, linewidth=2, label=name) for name, colour in colours.items()]
    lines += [Line2D([], [], color="#444444", linestyle=style, label=group) for group, style in styles.items()]
    figure.legend(handles=lines, loc="outside lower center", ncols=min(6, len(lines)), frameon=False)
    figure.savefig(path, dpi=160)
