"""What was asked for each layer, what it has, what it takes, and which kernel computes it."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from ._backend import Backend, Site, model_backend
from ._wrap import float_bytes, walk


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layer of a report.

    Attributes:
        path: The layer's place in its model; its first, if it has several.
        layer: The name of its class.
        asked: The policy that was asked for; `""` for a layer that was never wrapped.
        policy: The policy that it has.
        quantized: Whether it computes with codes.
        bytes_before: What its float tensors took; shared ones count once, at their first layer.
        bytes_after: What its tensors take now.
        kernel: The routine that multiplies.
        note: Why it is not quantized, or what else there is to know.
    """

    path: str
    layer: str
    asked: str
    policy: str
    quantized: bool
    bytes_before: int
    bytes_after: int
    kernel: str
    note: str


@dataclass(frozen=True)
class Report:
    """A report over a model. `str` and `print` give it as a table.

    Attributes:
        rows: One for each layer, in the model's order.
    """

    rows: tuple[Row, ...]

    @property
    def bytes_before(self) -> int:
        """What the model's float tensors took."""
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """What the model's tensors take now."""
        return sum(row.bytes_after for row in self.rows)

    def to_json(self) -> str:
        """Gives rows and totals as JSON text."""
        totals = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after}
        return json.dumps({"rows": [asdict(row) for row in self.rows], **totals}, indent=2)

    def __str__(self) -> str:
        # Imported when a table is wanted: 13 ms.
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, show_footer=True, pad_edge=False)
        totals = {"path": "total", "before": f"{self.bytes_before:,}"}
        totals["after"] = f"{self.bytes_after:,}"
        for name in ("path", "layer", "policy", "before", "after", "kernel", "note"):
            number = name in ("before", "after")
            table.add_column(
                name, totals.get(name, ""), justify="right" if number else "left", overflow="fold"
            )
        # Notes repeat from layer to layer: each is written once, below the table.
        notes = {note: f"[{i + 1}]" for i, note in enumerate(self._notes())}
        for row in self.rows:
            policy = row.policy or "(not wrapped)"
            if row.asked != row.policy:
                policy += f" (asked: {row.asked})"
            sizes = (f"{row.bytes_before:,}", f"{row.bytes_after:,}")
            cells = (row.path or "(model)", row.layer, policy, *sizes, row.kernel)
            table.add_row(*map(Text, (*cells, notes.get(row.note, ""))))
        console = Console(width=140, color_system=None, force_terminal=False)
        with console.capture() as capture:
            console.print(table)
        lines = [line.rstrip() for line in capture.get().splitlines()]
        lines += [f"{mark} {note}" for note, mark in notes.items()]
        return "\n".join(lines).strip("\n")

    def _notes(self) -> list[str]:
        return list(dict.fromkeys(row.note for row in self.rows if row.note))


def report(model: Any) -> Report:
    """Gives a report over a model, wrapped or not.

    Args:
        model: A model of any framework that has a backend.

    Raises:
        TypeError: No backend serves such a model.
        ValueError: The model has no layers.
    """
    adapter = model_backend(model)
    seen_before: set[object] = set()
    seen_after: set[object] = set()
    return Report(
        tuple(_row(adapter, site, seen_before, seen_after) for site in walk(adapter, model))
    )


def _row(adapter: Backend, site: Site, before: set[object], after: set[object]) -> Row:
    now = 0
    for tensor in site.tensors.values():
        key = adapter.storage_key(tensor)
        if key not in after:
            after.add(key)
            now += int(tensor.nbytes)
    notes = [] if len(site.paths) == 1 else [f"also at {', '.join(site.paths[1:])}"]
    made = None if site.wrapping is None else site.wrapping.plan
    if made is not None and made.note:
        notes.append(made.note)
    if made is not None and made.trainable:
        notes.append("trainable: keeps the float weight; freeze() leaves only codes")
    return Row(
        path=site.path,
        layer=site.spec.layer_type,
        asked="" if made is None else made.asked.name,
        policy="" if made is None else made.policy.name,
        quantized=made is not None and made.quantized,
        bytes_before=float_bytes(adapter, site, before),
        bytes_after=now,
        kernel="" if made is None else made.kernel,
        note="; ".join(notes),
    )
