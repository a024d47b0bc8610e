"""Small products through every family of the kernels of packed weights, for the sanitizer, which slows them down:

compute-sanitizer --tool memcheck (or racecheck) python tests/plugins/sanitize_linears.py [w4a16 or ternary]
"""

from __future__ import annotations

import sys
from pathlib import Path

DTYPES = ("bfloat16", "float16")
SIZES = (
    # rows, outputs, inputs: with one row and with few outputs; with shares of the inputs; with many outputs; with many inputs
    (1, 107, 640),
    (1, 9000, 128),
    (6, 48, 1152),
    (13, 150, 1024),
    (29, 300, 2048),
    (40, 200, 640),
    (64, 2300, 1280),
    (17, 18000, 256),
    (16, 2200, 8192),
)


def products(kind: str) -> int:
    """Runs all products of one kind and checks them; how many there were."""
    from decode_cases import error
    from linear_cases import ROW, TOLERANCE, TernaryCase, W4A16Case

    of_kind, groups = (W4A16Case, (64, 128)) if kind == "w4a16" else (TernaryCase, (ROW, 32, 128))
    count = 0
    for place, (rows, outputs, inputs) in enumerate(SIZES):
        for number, group in enumerate(groups):
            # Gated or not, and of either dtype, in turn: every family sees each, but not every size.
            gated = (place // 2 + number) % 2 == 1
            dtype = DTYPES[(place + number) % 2]
            wide = outputs // 16 * 16 if gated else outputs
            case = of_kind(rows, wide, inputs, group=group, gated=gated, dtype=dtype)
            expected = case.expected()
            for name in ("tiles", "groups", "scales", "x", "bias", "residual"):
                value = getattr(case, name, None)
                if value is not None:
                    setattr(case, name, value.cuda())
            found = error(case.run().cpu(), expected)
            if not found < TOLERANCE:
                raise AssertionError(
                    f"{kind} {rows} x {wide} x {inputs}, {group}, {dtype}, gated {gated}: error {found}"
                )
            count += 1
    return count


def main() -> None:
    """Runs what the command line asks for."""
    here = Path(__file__).resolve().parent
    sys.path[:0] = [str(here.parent.parent), str(here)]
    for kind in sys.argv[1:] or ("w4a16", "ternary"):
        sys.stdout.write(f"{kind}: {products(kind)} products\n")


if __name__ == "__main__":
    main()
