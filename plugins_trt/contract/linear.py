"""What the linears with packed weights share of their checks."""

from __future__ import annotations

from plugins_trt.contract.arrays import DeviceArray, LaunchError, ceil_div, check_array, check_workspace


def check_results(
    out: DeviceArray,
    bias: DeviceArray | None,
    residual: DeviceArray | None,
    *,
    dtype: str,
    tiles: int,
    tile: int,
    gated: bool,
) -> None:
    """Refuses results of other sizes than the weights', and what is added to them where its shape is another.

    Args:
        out: ``[M, N]``, gated ``[M, N / 2]``.
        bias: ``[N]``.
        residual: Of the shape of ``out``; not with gated weights.
        dtype: Of all of them.
        tiles: Of the weights.
        tile: Outputs of one.
        gated: Whether the weights are gate and up.

    Raises:
        LaunchError: naming `out`, `bias` or `residual`.
    """
    outputs = out.shape[1] * (2 if gated else 1)
    if ceil_div(outputs, tile) != tiles:
        raise LaunchError(
            f"out: shape {out.shape}, must be of {tiles} tiles of {tile} outputs{' (gate and up)' if gated else ''}"
        )
    if bias is not None:
        check_array("bias", bias, dtype, (outputs,), alignment=2)
    if residual is not None:
        if gated:
            raise LaunchError("residual: given, but gated outputs are no branch of the residual stream")
        check_array("residual", residual, dtype, out.shape, alignment=2)


def check_product_workspace(workspace: DeviceArray | None, needed: int) -> None:
    """Refuses a workspace that is missing or too small where ``needed`` bytes are.

    Raises:
        LaunchError: naming `workspace`.
    """
    if not needed:
        return
    if workspace is None:
        raise LaunchError(f"workspace: missing, this product needs {needed} bytes")
    check_workspace("workspace", workspace, needed)
