"""Where the compile cache is, how large it may grow, and who uses it.

Plain sessions do not use it. Packages use what is there, and let providers that compile for seconds keep what they
compile. `rlx-ort package warm` fills it, and sessions that ask: `CompileOptions(cache=CacheUse.ON)`, `RLX_CACHE=on`, or
`WeightSharing.PREPACKED`. `RLX_CACHE=off` keeps packages from it as well.
"""

from __future__ import annotations

from rlx_ort import environment

__all__ = ["DEFAULT_LIMIT_BYTES", "limit_bytes", "parse_bytes", "use_of"]

DEFAULT_LIMIT_BYTES = 10 * 1024**3
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_SIZE = r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?"


def limit_bytes() -> int:
    """Return the most bytes the entries together take: `RLX_CACHE_LIMIT`, such as `4G`, by default 10 GiB."""
    return environment.parse_or("CACHE_LIMIT", DEFAULT_LIMIT_BYTES, parse_bytes)


def parse_bytes(text: str) -> int:
    """Return the bytes of a text such as `500M`, `4G` or `1.5 GiB`; units count in 1024.

    Raises:
        ValueError: the text is no size.
    """
    import re

    match = re.fullmatch(_SIZE, text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no size such as 500M or 4G")
    return int(float(match[1]) * _UNITS[match[2]])


def use_of(asked: str | None, default: str = "off") -> str:
    """Return how the cache is used, `on`, `off` or `found`: as asked, else by `RLX_CACHE`, else by default.

    A variable that is neither, such as `1` or `0`, is read as a flag.
    """
    if asked is not None:
        return asked
    value = (environment.get("CACHE") or default).strip().lower()
    if value in ("on", "off", "found"):
        return value
    return "on" if environment.flag("CACHE") else "off"
