"""What an entry of the zoo is: a model and a loss, and what the engine may do with them."""

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]
Made = nn.Module | tuple[nn.Module, Loss]

ISOLATED = frozenset({"isolated"})  # an ordinary model: to refuse it would be a loss
REFUSED = frozenset({"refused"})
EITHER = ISOLATED | REFUSED


@dataclass(frozen=True)
class Entry:
    """`make()` gives a new model in float64, with all that it shares with the process as at first, and its loss."""

    name: str
    factory: Callable[[], Made] = field(repr=False)
    expected: frozenset[str]
    data: str = "dense"  # or "words"
    row_fields: Mapping[str, str] | None = None
    by_data: bool = False  # whether only some users' data bring out what is wrong, so that only then it is refused

    def make(self) -> tuple[nn.Module, Loss]:
        with warnings.catch_warnings(action="ignore"):  # of what torch no longer recommends
            made = self.factory()
        model, loss = made if isinstance(made, tuple) else (made, LOSSES[self.data])
        return model.double(), loss


class Zoo(dict[str, Entry]):
    """Entries by name. A decorator names an entry after the function below it."""

    def add(self, expected: frozenset[str], **facts: object) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
        """The function makes the model, or the model and its loss."""

        def added(factory: Callable[[], Made]) -> Callable[[], Made]:
            name = factory.__name__.replace("_", " ")
            assert name not in self
            self[name] = Entry(name, factory, expected, **facts)
            return factory

        return added

    def net(self, expected: frozenset[str], *, by_data: bool = False, **state: object) -> Callable[..., None]:
        """The function is `Net.seen` of a class of its own, whose instances begin with copies of these attributes."""

        def added(seen: Callable[[nn.Module, Tensor], Tensor]) -> None:
            def factory() -> nn.Module:
                made = type("Careless", (Net,), {"seen": seen})()
                for name, value in state.items():
                    setattr(made, name, copy.deepcopy(value))
                return made

            factory.__name__ = seen.__name__
            self.add(expected, by_data=by_data)(factory)

        return added

    def loss(self, expected: frozenset[str]) -> Callable[[Loss], None]:
        """The function is the loss of a plain `Net`."""

        def added(loss: Loss) -> None:
            def factory() -> Made:
                return Net(), loss

            factory.__name__ = loss.__name__
            self.add(expected)(factory)

        return added


def mean(x: Tensor) -> Tensor:
    return x.detach().mean(dim=0)


def cross_entropies(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def word_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["words"], batch["values"]), batch["y"], reduction="none")


LOSSES = {"dense": cross_entropies, "words": word_losses}


class Net(nn.Module):
    """4 features to 3 classes. What an entry does beside it stands in `seen`, which may change the input."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(self.seen(x))))

    def seen(self, x: Tensor) -> Tensor:
        return x
