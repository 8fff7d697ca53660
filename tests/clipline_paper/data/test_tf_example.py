import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tff_layouts import delimited, example, feature

from clipline_paper.data.tff_files import parse_example

INT64 = st.integers(-(2**63), 2**63 - 1)


def test_bytes_written_by_hand():
    """{"a": int64_list [1, 300]} as the encoding guide of protocol buffers spells 300: 0xAC 0x02."""
    message = bytes.fromhex("0a 0e 0a 0c 0a 01 61 12 07 1a 05 0a 03 01 ac 02")
    assert parse_example(message)["a"].tolist() == [1, 300]


@pytest.mark.parametrize("packed", [True, False])
def test_all_three_kinds_packed_and_unpacked(packed):
    data = example(packed, snippets="naïve", pixels=[0.5, -1.0, 0.25], label=[7], tags=b"\x00\xff")
    features = parse_example(data)
    assert features["snippets"] == ["naïve".encode()]
    assert features["tags"] == [b"\x00\xff"]
    assert features["pixels"].dtype == np.float32
    assert features["pixels"].tolist() == [0.5, -1.0, 0.25]
    assert features["label"].tolist() == [7]


@given(st.lists(INT64, min_size=1), st.booleans())
def test_every_int64_survives(numbers, packed):
    found = parse_example(example(packed, x=numbers))["x"]
    assert found.dtype == np.int64
    assert found.tolist() == numbers


def test_unknown_fields_empty_features_and_an_empty_message_are_fine():
    entry = delimited(1, b"a") + delimited(2, feature([5])) + delimited(9, b"later version")
    data = b"\x10\x96\x01" + b"\x19" + b"8 bytes." + b"\x25" + b"four" + delimited(1, delimited(1, entry))
    assert parse_example(data)["a"].tolist() == [5]
    assert parse_example(b"") == {}
    assert parse_example(delimited(1, delimited(1, delimited(1, b"a")))) == {"a": []}


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_truncated_message_is_refused(cut):
    data = example(x=[1, 300], y=[0.5])
    with pytest.raises(ValueError, match="byte"):
        parse_example(data[:-cut])
