"""One look for every figure: colours that mean the same thing everywhere, readable on white, on black and in grey.

Colours are Okabe and Ito's palette (safe for colour-blind readers); what a colour says, a dash or marker says too.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio

from spoc_lib.config import Cluster
from spoc_lib.core.quickimport import import_jsonschema

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#B8A800",
    "#8A8F98",
)
SERIES = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, GREY)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
PATTERNS = ("", "/", "\\", "x", ".", "+", "-", "|")

#: Places in the palette of the GPUs that ship: a cluster looks the same in every report.
GPUS = {"h100-sxm": 0, "h200-sxm": 1, "cpu": 2}
PERSONAS = {"P0": BLUE, "P1": ORANGE, "P2": GREEN, "all": GREY}
VERDICTS = {"met": GREEN, "missed": RED, "undecided": YELLOW, "invalid": GREY}
#: The same in shapes and signs, for those who do not see the colours.
VERDICT_SYMBOLS = {"met": "circle", "missed": "x", "undecided": "diamond", "invalid": "cross"}
VERDICT_SIGNS = {"met": "✓", "missed": "✗", "undecided": "?"}
DRIVERS = {"virtual": BLUE, "locust": RED}

#: Kernel categories in the order of the legend, with what a reader calls them.
KERNELS = {
    "attn": ("FlashAttention", BLUE),
    "moe_gemm": ("MoE expert GEMM", ORANGE),
    "moe_route": ("MoE routing", YELLOW),
    "gemm": ("dense GEMM", GREEN),
    "comm": ("collectives", RED),
    "norm": ("norm", SKY),
    "rope": ("RoPE", PURPLE),
    "kv": ("KV write", "#7A5195"),
    "act": ("activation", "#A3BE8C"),
    "sample": ("sampling", "#B48EAD"),
    "mem": ("copies", "#5E81AC"),
    "other": ("other", GREY),
    "idle": ("idle", "#D9DCE1"),
}

#: How plotly.js draws: no button that would send a user's data elsewhere.
CONFIG = {
    "displaylogo": False, "responsive": True, "plotlyServerURL": "",
    "modeBarButtonsToRemove": ["sendChartToCloud", "lasso2d", "select2d"],
}  # fmt: skip

INK = "#6B7280"  # readable on white and on near-black
_GRID = "rgba(128,134,145,0.25)"


def activate() -> None:
    """Make the workbench's template the default, and figures a MIME bundle that JupyterLab and our HTML both draw."""
    import_jsonschema()  # plotly's renderers want it
    axis = {
        "gridcolor": _GRID,
        "zerolinecolor": _GRID,
        "linecolor": _GRID,
        "ticks": "outside",
        "title_standoff": 8,
        "automargin": True,
    }
    pio.templates["spoc"] = go.layout.Template(
        layout=go.Layout(
            font={
                "family": "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif",
                "size": 13,
                "color": INK,
            },
            colorway=list(SERIES),
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            xaxis=axis,
            yaxis=axis,
            margin={"l": 64, "r": 24, "t": 76, "b": 48},
            modebar={"bgcolor": "rgba(0,0,0,0)", "color": INK},
            height=380,
            legend={"orientation": "h", "yref": "container", "yanchor": "bottom", "y": 0, "x": 0},
            hovermode="closest",
            scene={
                name: {"gridcolor": GREY, "backgroundcolor": "rgba(0,0,0,0)", "color": INK, "showline": True}
                for name in ("xaxis", "yaxis", "zaxis")
            },
            title={"x": 0, "xanchor": "left", "yref": "container", "y": 0.985, "yanchor": "top", "font": {"size": 15}},
        )
    )
    warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm asks for widgets that nobody needs here
    pio.templates.default = "spoc"
    pio.renderers.default = "plotly_mimetype"
    pio.renderers["plotly_mimetype"].config = CONFIG


def nothing(why: str) -> go.Figure:
    """A low figure that says why there is nothing to draw."""
    figure = go.Figure().update_layout(height=140)
    figure.add_annotation(text=why, showarrow=False, xref="paper", yref="paper", x=0.5, y=0.5)
    return figure.update_xaxes(visible=False).update_yaxes(visible=False)


def log_axis(values: Iterable[float]) -> dict:
    """A logarithmic axis whose ticks are round numbers written in full (Plotly's own show bare digits)."""
    known = np.asarray(list(values), dtype=float)
    known = known[np.isfinite(known) & (known > 0)]
    if not len(known):
        return {"type": "log"}
    low, high = float(known.min()), float(known.max())
    digits = (1, 2, 5) if high > 6 * low else (1, 1.5, 2, 3, 4, 5, 7)
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    every = (digit * 10.0**power for power in powers for digit in digits)
    ticks = [tick for tick in every if 0.8 * low <= tick <= 1.25 * high]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}


def fill(colour: str | Sequence[str], position: int) -> dict:
    """Marker of a bar: its colour, and a hatching that says the same in black and white."""
    shape = PATTERNS[position % len(PATTERNS)]
    return {
        "color": colour,
        "pattern": {
            "shape": shape,
            "fillmode": "overlay",
            "fgcolor": "rgba(255,255,255,0.7)",
            "size": 7,
            "solidity": 0.25,
        },
    }


@dataclass(frozen=True, slots=True)
class Look:
    """How one cluster is drawn everywhere: `place` in the palette gives colour, dash, marker and hatching alike."""

    place: int

    @property
    def colour(self) -> str:
        """Of lines, bars and borders."""
        return SERIES[self.place % len(SERIES)]

    @property
    def line(self) -> dict[str, str]:
        """Plotly's `line`: colour and dash."""
        return {"color": self.colour, "dash": DASHES[self.place % len(DASHES)]}

    @property
    def marker(self) -> dict[str, object]:
        """Plotly's `marker`: symbol and colour."""
        return {"symbol": MARKERS[self.place % len(MARKERS)], "size": 9, "color": self.colour}

    @property
    def bar(self) -> dict[str, object]:
        """Plotly's `marker` of a bar: colour and pattern."""
        return fill(self.colour, self.place)


def looks(clusters: Sequence[Cluster]) -> list[Look]:
    """A look for each cluster: by its GPU, so that it is the same in every report; where that one is taken by an
    earlier cluster of this report, the next that is free."""
    taken: list[int] = []
    for cluster in clusters:
        gpu = cluster.hardware.gpu_name
        place = GPUS.get(gpu, len(GPUS) + zlib.crc32(gpu.encode()) % (len(SERIES) - len(GPUS)))
        while place in taken and len(taken) < len(SERIES):
            place = (place + 1) % len(SERIES)
        taken.append(place)
    return [Look(place) for place in taken]


def persona_colour(name: str, position: int = 0) -> str:
    """Colour of a persona by name; unknown ones take the palette in order."""
    return PERSONAS.get(name, SERIES[position % len(SERIES)])
