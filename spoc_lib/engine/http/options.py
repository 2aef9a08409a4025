"""The throttle of the embedded server, as given on the command line."""

from __future__ import annotations

from spoc_lib.core.errors import InputError
from spoc_lib.engine.gpu_counters import Throttle


def parse_throttle(text: str | None) -> Throttle | None:
    """`gpu=1,at=60,factor=0.7`; InputError naming what is wrong."""
    if text is None:
        return None
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    wrong = set(parts) ^ {"gpu", "at", "factor"}
    if wrong:
        raise InputError("bad-throttle", f"--throttle {text}: give gpu, at (seconds) and factor, "
                         f"as gpu=1,at=60,factor=0.7 (wrong or missing: {', '.join(sorted(wrong))})")
    try:
        throttle = Throttle(int(parts["gpu"]), float(parts["at"]), float(parts["factor"]))
    except ValueError as error:
        raise InputError("bad-throttle", f"--throttle {text}: {error}") from error
    if throttle.gpu < 0 or throttle.at_s < 0 or not 0 < throttle.factor < 1:
        raise InputError("bad-throttle", f"--throttle {text}: gpu and at are not negative, factor lies between 0 and 1")
    return throttle
