"""State beside the parameters: what a model or its loss keeps from one call to the next."""

import numpy as np
import torch
import torch.nn.functional as F
from adversarial.entry import EITHER, Net, Zoo, cross_entropies, mean

zoo = Zoo()
COUNT = 0


@zoo.net(EITHER, last=None)
def last_input_kept_and_added(self, x):
    before, self.last = self.last, mean(x)
    return x if before is None else x + before


@zoo.net(EITHER, mean=torch.zeros(4, dtype=torch.float64))
def running_mean_in_place_in_a_plain_tensor(self, x):
    self.mean.mul_(0.9).add_(mean(x), alpha=0.1)
    return x - self.mean


@zoo.net(EITHER, mean=np.zeros(4))
def running_mean_in_a_numpy_array(self, x):
    self.mean += mean(x).cpu().numpy()
    return x - 0.1 * torch.from_numpy(self.mean).to(x)


@zoo.net(EITHER, steps=0)
def step_counter_that_scales_the_output(self, x):
    self.steps += 1
    return x / self.steps


@zoo.net(EITHER, history=[])
def list_that_grows(self, x):
    self.history.append(mean(x))
    return x + sum(self.history) / len(self.history)


@zoo.net(EITHER, cache={})
def cache_by_shape(self, x):
    return x - self.cache.setdefault(x.shape, mean(x))


class Box:
    def __init__(self, inner):
        self.inner = inner


@zoo.net(EITHER, box=Box(Box([0.0])))
def nested_object(self, x):
    self.box.inner.inner[0] = 0.5 * self.box.inner.inner[0] + mean(x)
    return x + self.box.inner.inner[0]


@zoo.net(EITHER)
def class_attribute(self, x):
    type(self).mean = 0.5 * getattr(type(self), "mean", 0.0) + mean(x)
    return x + type(self).mean


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
    last = 0.0

    def closing(model, batch):
        nonlocal last
        before, last = last, mean(batch["x"])
        return cross_entropies(model, {**batch, "x": batch["x"] + before})

    return Net(), closing


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


@zoo.net(EITHER)
def default_dtype_left_changed(self, x):
    scale = 1.0 if torch.get_default_dtype() == torch.float32 else 2.0
    torch.set_default_dtype(torch.float64)
    return x * scale


@zoo.net(EITHER, by_data=True, alarm=False)
def memory_of_huge_values_alone(self, x):
    """Ordinary users leave nothing behind, so that no trial on made-up data sees it."""
    self.alarm = self.alarm or bool((x.detach().abs() > 1e6).any())
    return -x if self.alarm else x
