"""Sampler names: the spellings users write, and their letters."""

LETTERS = {
    "d": "dry",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "s": "top_n_sigma",
    "m": "min_p",
    "t": "temperature",
    "x": "xtc",
    "i": "infill",
    "e": "penalties",
    "a": "adaptive_p",
}

ALIASES = {
    "topk": "top_k",
    "typ": "typ_p",
    "typp": "typ_p",
    "topp": "top_p",
    "nucleus": "top_p",
    "topnsigma": "top_n_sigma",
    "minp": "min_p",
    "temp": "temperature",
    "adaptivep": "adaptive_p",
}


def canonical_name(name: str) -> str | None:
    """`Top-K` -> `top_k`; None for a name nobody knows."""
    plain = name.strip().lower().replace("-", "_")
    if plain in LETTERS.values():
        return plain
    return ALIASES.get(plain)
