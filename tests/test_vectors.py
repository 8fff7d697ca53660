import pytest
import torch

from clipline import vectors as cache
from clipline.vectors import _PART, in_parts, parts

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 3])
def cores(request, monkeypatch):
    """One core, or several with one thread of torch each: then parts are done side by side."""
    monkeypatch.setattr(cache, "_cores", lambda: request.param)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    cache._threads.cache_clear()
    yield request.param
    cache._threads.cache_clear()


@pytest.mark.parametrize("count", [0, 1, _PART, 9 * _PART + 5])
def test_every_number_is_in_one_part(cores, count):
    seen = torch.zeros(count, dtype=torch.int64)
    in_parts(lambda part: seen[part].add_(1), count, CPU)
    assert torch.equal(seen, torch.ones_like(seen))


def test_parts_side_by_side_give_what_they_give_one_after_the_other(cores):
    numbers = torch.randn(20 * _PART + 5, generator=torch.Generator().manual_seed(0))
    together, alone = torch.empty(2, len(numbers))
    in_parts(lambda part: torch.div(numbers[part], 3.7, out=together[part]), len(numbers), CPU)
    for part in parts(len(numbers), CPU):
        torch.div(numbers[part], 3.7, out=alone[part])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("bad", [0, 7])
def test_an_error_in_any_part_is_raised(cores, bad):
    def fail(part):
        if part.start == bad * _PART:
            raise RuntimeError("in that part")

    with pytest.raises(RuntimeError, match="in that part"):
        in_parts(fail, 20 * _PART, CPU)
