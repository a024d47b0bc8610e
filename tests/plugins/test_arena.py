import pytest

from plugins_trt.arena import Arena, page_bytes
from plugins_trt.contract import Batch, DeviceArray, LaunchError


def arena(**changes):
    pointers = {"keys": 1 << 20, "values": 2 << 20, "fine": 3 << 20, "coarse": 4 << 20}
    sizes = {"layers": 3, "pages": 10, "kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}
    return Arena.contiguous(**{**sizes, **pointers, **changes})


def test_a_layer_begins_behind_the_one_before():
    packed = arena().pack(2)
    assert len(packed) == 12
    keys = (1 << 20) + 2 * (10 * 2 * 64 * 128) * 2
    assert packed[:3] == (keys, 2 * 64 * 128, 64 * 128)
    assert packed[9:] == ((4 << 20) + 2 * (10 * 2 * 128) * 2, 2 * 128, 128)


def test_a_page_takes_its_keys_values_and_compressed_keys():
    # MiniCPM4-8B: 32 KiB a token, and 5 compressed keys for each 64 of them
    assert page_bytes(32, 2, 128, "bfloat16") == 64 * 32768 + 5 * 32 * 2 * 128 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 96}, "^head_dim: 96"),
        ({"dtype": "float32"}, "^dtype: float32"),
        ({"keys": 8}, "^keys: pointer 0x8"),
        ({"pages": 0}, "^pages: 0"),
    ],
)
def test_a_geometry_the_kernels_cannot_take_is_refused(changes, message):
    with pytest.raises(LaunchError, match=message):
        arena(**changes)


def batch(**changes):
    arrays = {
        "sequence_starts": DeviceArray(16, "int32", (3,)),
        "lengths": DeviceArray(16, "int32", (2,)),
        "page_tables": DeviceArray(16, "int32", (2, 7)),
        "positions": DeviceArray(16, "int32", (8,)),
    }
    return Batch(**{**arrays, **changes})


def test_a_batch_knows_its_bucket():
    assert (batch().sequences, batch().tokens, batch().max_pages) == (2, 8, 7)
    assert batch().pack() == (16, 16, 16, 16, 0, 2, 8, 7, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": DeviceArray(16, "int32", (3,))}, "^lengths: shape"),
        ({"positions": DeviceArray(16, "int64", (8,))}, "^positions: dtype int64"),
        ({"page_tables": DeviceArray(16, "int32", (2, 7), (9, 1))}, "^page_tables: strides"),
        ({"page_tables": DeviceArray(0, "int32", (2, 7))}, "^page_tables: a null pointer"),
        ({"tree_masks": DeviceArray(16, "uint64", (7,))}, "^tree_masks: shape"),
        ({"tree_masks": DeviceArray(12, "uint64", (8,))}, "^tree_masks: pointer"),
    ],
)
def test_a_batch_of_other_shapes_is_refused(changes, message):
    with pytest.raises(LaunchError, match=message):
        batch(**changes)
