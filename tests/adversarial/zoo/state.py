"""State beside the parameters: what a model or its loss keeps from one call to the next."""

import functools

import numpy as np
import torch
import torch.nn.functional as F
from adversarial.entry import EITHER, Net, Zoo, cross_entropies

zoo = Zoo()
LAST = {}
COUNT = 0


def mean(x):
    return x.detach().mean(dim=0)


@zoo.add(EITHER)
def last_input_kept_and_added():
    class Memory(Net):
        last = None

        def seen(self, x):
            before, self.last = self.last, mean(x)
            return x if before is None else x + before

    return Memory()


@zoo.add(EITHER)
def running_mean_as_attribute():
    class Running(Net):
        def __init__(self):
            super().__init__()
            self.mean = 0.0

        def seen(self, x):
            self.mean = 0.9 * self.mean + 0.1 * mean(x)
            return x - self.mean

    return Running()


@zoo.add(EITHER)
def running_mean_in_place_in_a_plain_tensor():
    class Running(Net):
        def __init__(self):
            super().__init__()
            self.mean = torch.zeros(4, dtype=torch.float64)

        def seen(self, x):
            self.mean.mul_(0.9).add_(mean(x), alpha=0.1)
            return x - self.mean

    return Running()


@zoo.add(EITHER)
def running_mean_in_a_numpy_array():
    class Running(Net):
        def __init__(self):
            super().__init__()
            self.mean = np.zeros(4)

        def seen(self, x):
            self.mean += mean(x).cpu().numpy()
            return x - 0.1 * torch.from_numpy(self.mean).to(x)

    return Running()


@zoo.add(EITHER)
def step_counter_that_scales_the_output():
    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.steps = 0

        def seen(self, x):
            self.steps += 1
            return x / self.steps

    return Counting()


@zoo.add(EITHER)
def list_that_grows():
    class Growing(Net):
        def __init__(self):
            super().__init__()
            self.history = []

        def seen(self, x):
            self.history.append(mean(x))
            return x + sum(self.history) / len(self.history)

    return Growing()


@zoo.add(EITHER)
def cache_by_shape():
    class Cached(Net):
        def __init__(self):
            super().__init__()
            self.cache = {}

        def seen(self, x):
            return x - self.cache.setdefault(x.shape, mean(x))

    return Cached()


class Box:
    def __init__(self, inner):
        self.inner = inner


@zoo.add(EITHER)
def nested_object():
    class Nested(Net):
        def __init__(self):
            super().__init__()
            self.box = Box(Box([0.0]))

        def seen(self, x):
            self.box.inner.inner[0] = 0.5 * self.box.inner.inner[0] + mean(x)
            return x + self.box.inner.inner[0]

    return Nested()


@zoo.add(EITHER)
def class_attribute():
    class Shared(Net):
        mean = 0.0

        def seen(self, x):
            type(self).mean = 0.5 * type(self).mean + mean(x)
            return x + type(self).mean

    return Shared()


@zoo.add(EITHER)
def module_level_global():
    class Global(Net):
        def seen(self, x):
            before = LAST.get("mean", 0.0)
            LAST["mean"] = mean(x)
            return x + before

    LAST.clear()
    return Global()


@zoo.add(EITHER)
def global_rebound():
    class Global(Net):
        def seen(self, x):
            global COUNT
            COUNT += 1
            return x / COUNT

    global COUNT
    COUNT = 0
    return Global()


@zoo.add(EITHER)
def closure_of_the_loss():
    last = [0.0]

    def closing(model, batch):
        before, last[0] = last[0], mean(batch["x"])
        return cross_entropies(model, {**batch, "x": batch["x"] + before})

    return Net(), closing


@zoo.add(EITHER)
def nonlocal_counter_of_the_loss():
    calls = 0

    def counting(model, batch):
        nonlocal calls
        calls += 1
        return cross_entropies(model, batch) / calls

    return Net(), counting


@zoo.add(EITHER)
def default_argument_list():
    def remembering(model, batch, seen=[]):  # noqa: B006  # the mistake itself
        seen.append(mean(batch["x"]))
        return cross_entropies(model, {**batch, "x": batch["x"] + sum(seen)})

    return Net(), remembering


@zoo.add(EITHER)
def callable_loss_with_state():
    class Balanced:
        """Weighs classes by how often they were seen."""

        def __init__(self):
            self.counts = torch.ones(3, dtype=torch.float64)

        def __call__(self, model, batch):
            counts = self.counts.to(batch["x"].device)
            counts += F.one_hot(batch["y"], 3).sum(dim=0)
            return cross_entropies(model, batch) / counts[batch["y"]]

    return Net(), Balanced()


@zoo.add(EITHER)
def lru_cache_by_length():
    class Cached(Net):
        def seen(self, x):
            @functools.cache
            def offset(_):
                return mean(self.now)

            self.offset = getattr(self, "offset", offset)
            self.now = x
            return x - self.offset(len(x))

    return Cached()


@zoo.add(EITHER)
def default_dtype_left_changed():
    class Coarse(Net):
        def seen(self, x):
            scale = 1.0 if torch.get_default_dtype() == torch.float32 else 2.0
            torch.set_default_dtype(torch.float64)
            return x * scale

    return Coarse()


@zoo.add(EITHER, by_data=True)
def memory_of_huge_values_alone():
    """Ordinary users leave nothing behind, so that no trial on made-up data sees it."""

    class Alarm(Net):
        def __init__(self):
            super().__init__()
            self.alarm = False

        def seen(self, x):
            self.alarm = self.alarm or bool((x.detach().abs() > 1e6).any())
            return -x if self.alarm else x

    return Alarm()
