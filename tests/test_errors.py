import math
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa
import pytest
import torch

from clipline.errors import CliplineError, SettingError, check_choice, check_number, check_whole, nearest, refuse


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", None, True, 0, -1, 11])
def test_numbers_outside_their_limits_are_refused_with_name_value_limit_and_way_out(value):
    with pytest.raises(SettingError) as error:
        check_number("rate", value, above=0, at_most=10, way_out="try 1")
    assert str(error.value) == f"rate={value!r} must be a finite number above 0 and at most 10: try 1"


@pytest.mark.parametrize("value", [1, 2.5, np.float32(0.5), np.int64(3)])
def test_numbers_of_any_kind_come_back_as_floats(value):
    number = check_number("rate", value, at_least=0, below=10, way_out="")
    assert type(number) is float
    assert number == float(value)


def test_infinity_is_a_number_only_where_it_may_be():
    assert check_number("clip", math.inf, above=0, infinite=True, way_out="") == math.inf
    with pytest.raises(SettingError):
        check_number("clip", math.nan, above=0, infinite=True, way_out="")


@pytest.mark.parametrize("value", [1.0, "3", None, False, 0, 6])
def test_whole_numbers_are_whole(value):
    with pytest.raises(SettingError, match=r"users=.* must be a whole number at least 1 and at most 5: more"):
        check_whole("users", value, at_least=1, at_most=5, way_out="more")
    assert check_whole("users", np.int32(4), at_least=1, at_most=5, way_out="") == 4


def test_a_misspelt_choice_gets_the_nearest_one():
    with pytest.raises(SettingError) as error:
        check_choice("task", "handwritting", ["handwriting", "emnist"])
    assert str(error.value) == "task='handwritting' must be one of handwriting, emnist: did you mean 'handwriting'?"
    assert nearest("zzz", ["ab", "cd"]) == "choose among ab, cd"
    assert nearest("x", []) == "there is none to choose"
    assert nearest("x", [None, b"a", 3]) == "choose among None, b'a', 3"


@pytest.mark.parametrize("value", [2**63, -(2**63), 10**24, 10**400, np.uint64(2**63)])
def test_whole_numbers_of_more_than_64_bits_are_refused_without_their_digits(value):
    for check in (check_number, check_whole):
        with pytest.raises(SettingError) as error:
            check("rate", value, way_out="try 1")
        assert len(str(error.value)) < 100
    assert check_whole("rate", 2**63 - 1, way_out="") == 2**63 - 1
    assert check_whole("rate", 2**99, at_most=2**99, way_out="") == 2**99  # unless they are allowed
    assert check_number("rate", 1e24, way_out="") == 1e24  # a fraction may be large


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (pa.table({"diagnosis": ["SECRET"]}), "<Table>"),
        (np.array([7781]), "<ndarray>"),
        (torch.tensor(7781.0), "<Tensor>"),
        ([1, np.array([7781])], "[1, <ndarray>]"),
        (list(range(7781, 7802)), "<list>"),
        ([[[7781]]], "[[<list>]]"),
        (torch.device("cpu"), "device(type='cpu')"),
        (PurePosixPath("a/b"), "PurePosixPath('a/b')"),
    ],
)
def test_what_may_hold_data_is_shown_by_its_type_alone(value, shown):
    assert str(refuse("clip", value, "above 0", "give 1")) == f"clip={shown} must be above 0: give 1"


def test_no_control_character_of_a_name_reaches_a_terminal():
    """Escape codes repaint lines, carriage returns overwrite them, and marks of direction turn them round."""
    error = CliplineError("column \x1b[2J\r\x9b1m\u202e é 文", "\x07 here\nand there")
    assert str(error) == "column \\x1b[2J\\r\\x9b1m\\u202e é 文: \\x07 here\nand there"
    assert error.hint == "\\x07 here\nand there"
    assert nearest("km", ["a\nb", "\x1b[2J"]) == "choose among a\\nb, \\x1b[2J"
    assert nearest("km", ["x" * 10_000] * 1000) == f"choose among {', '.join(['x' * 80] * 100)}, 900 more"
    assert len(str(CliplineError("x" * 10**6))) < 10**5
