"""What is known of a place that contents move to: how fast, at what cost, and under which limits. No tensors here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """A place as the simulator sees it.

    Attributes:
        out_bytes_per_second: from the device to the place; ``math.inf``: at once.
        in_bytes_per_second: back.
        latency_seconds: of each content, in each direction, on top of its bytes.
        cpu_seconds_per_byte: by how much a moved byte holds up the step's own computation, for each direction, even if
            nobody waits for it: on a CPU device copying takes the same cores and the same memory.
        min_bytes: smaller contents stay.
        window_bytes: contents that have left stay on the device, first in first out, up to so many bytes.
        ahead_bytes: contents that come back before they are asked for, at most so many bytes, or one content.
        cap_bytes: what may be at the place at once; None: no limit. What has no room there stays on the device.
        adjustable: the planner may choose smaller bounds than ``window_bytes`` and ``ahead_bytes``.
    """

    out_bytes_per_second: float
    in_bytes_per_second: float
    latency_seconds: float = 0.0
    cpu_seconds_per_byte: float = 0.0
    min_bytes: int = 64 * 1024
    window_bytes: int = 0
    ahead_bytes: int = 0
    cap_bytes: int | None = None
    adjustable: bool = False

    def __post_init__(self) -> None:
        speeds = ("out_bytes_per_second", "in_bytes_per_second")
        for name in (*speeds, "latency_seconds", "cpu_seconds_per_byte"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), (int, float)):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a number")
        for name in speeds:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be above 0")
        for name in ("latency_seconds", "cpu_seconds_per_byte"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a number, 0 or more")
        for name in ("min_bytes", "window_bytes", "ahead_bytes", "cap_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not (isinstance(value, int) or (value is None and name == "cap_bytes")):
                raise ValueError(f"{name}={value!r} must be a whole number of bytes")
            if value is not None and value < 0:
                raise ValueError(f"{name}={value!r} must be 0 or more")
        if not isinstance(self.adjustable, bool):
            raise ValueError(f"adjustable={self.adjustable!r} must be True or False")

    def choices(self) -> list[Transfer]:
        """The same with the bounds that the planner may choose, the largest first."""
        bounds = (self.window_bytes, self.ahead_bytes)
        if not (self.adjustable and any(bounds)):
            return [self]
        sizes = [bounds, (bounds[0] // 2, bounds[1] // 2), (0, 0)]
        return [replace(self, window_bytes=w, ahead_bytes=a, adjustable=False) for w, a in sizes]

    def out_seconds(self, nbytes: int) -> float:
        """How long a content takes on its way out."""
        return self.latency_seconds + nbytes / self.out_bytes_per_second

    def in_seconds(self, nbytes: int) -> float:
        """How long it takes on its way back."""
        return self.latency_seconds + nbytes / self.in_bytes_per_second

    def to_dict(self) -> dict[str, float | int | None]:
        """Numbers that JSON can hold (``math.inf`` as null, which no other speed is)."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, object]) -> Transfer:
        """The reverse of :meth:`to_dict`.

        Raises:
            ValueError: a number is missing, unknown, or no such number.
        """
        unknown = set(content) - {f.name for f in fields(cls)}
        missing = {"out_bytes_per_second", "in_bytes_per_second"} - set(content)
        if unknown or missing:
            raise ValueError(f"a transfer has no {', '.join(sorted(unknown | missing))}")
        found = {
            name: math.inf if value is None and name.endswith("_per_second") else value
            for name, value in content.items()
        }
        return cls(**found)  # type: ignore[arg-type]  # which numbers they must be, the class checks
