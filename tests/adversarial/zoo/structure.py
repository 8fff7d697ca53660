"""Ordinary and unusual architectures: tied, frozen, recurrent, scripted, compiled, hooked."""

import torch
import torch.nn.functional as F
from adversarial.entry import EITHER, ISOLATED, Net, Zoo, cross_entropies
from torch import nn
from torch.utils.checkpoint import checkpoint

zoo = Zoo()


def behind(layer, width):
    """A layer on the 4 features, then 3 classes."""
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(width, 3))


class Sequence(nn.Module):
    """The features as 2 steps of 2, a recurrence or attention over them, and 3 classes."""

    def __init__(self, layer, call, width):
        super().__init__()
        self.layer, self.call, self.out = layer, call, nn.Linear(width, 3)

    def forward(self, x):
        return self.out(self.call(self.layer, x.view(-1, 2, 2))[:, -1])


@zoo.add(ISOLATED)
def layer_norm():
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))


@zoo.add(ISOLATED)
def group_norm():
    return nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3))


@zoo.add(ISOLATED)
def instance_norm():
    return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, affine=True), nn.Flatten(), nn.Linear(4, 3))


@zoo.add(ISOLATED)
def tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.back, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
            self.back.weight = self.into.weight

        def forward(self, x):
            return self.out(self.back(torch.tanh(self.into(x))))

    return Tied()


@zoo.add(ISOLATED)
def parametrised_symmetric():
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).T

    layer = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return behind(layer, 4)


@zoo.add(ISOLATED)
def frozen_base():
    net = Net()
    net.hidden.requires_grad_(False)
    return net


@zoo.add(ISOLATED)
def adapter():
    class Adapted(Net):
        def __init__(self):
            super().__init__()
            self.requires_grad_(False)
            self.down, self.up = nn.Parameter(torch.randn(4, 1)), nn.Parameter(torch.zeros(1, 4))

        def seen(self, x):
            return x + x @ self.down @ self.up

    return Adapted()


@zoo.add(ISOLATED)
def parameter_that_is_not_used():
    net = Net()
    net.spare = nn.Linear(4, 3)
    return net


class Looking(nn.Module):
    """Features to places in a table."""

    def __init__(self, table):
        super().__init__()
        self.table, self.out = table, nn.Linear(2, 3)

    def forward(self, x):
        places = (x.nan_to_num().clamp(-1.9, 1.9) * 2 + 4).long()
        return self.out(self.table(places).mean(dim=1))


@zoo.add(ISOLATED)
def embedding():
    return Looking(nn.Embedding(8, 2))


@zoo.add(EITHER)
def embedding_with_max_norm():
    return Looking(nn.Embedding(8, 2, max_norm=0.5))


@zoo.add(ISOLATED)
def embedding_with_padding():
    return Looking(nn.Embedding(8, 2, padding_idx=3))


@zoo.add(EITHER)
def embedding_with_sparse_gradient():
    return Looking(nn.Embedding(8, 2, sparse=True))


@zoo.add(ISOLATED)
def lstm():
    return Sequence(nn.LSTM(2, 3, batch_first=True), lambda layer, x: layer(x)[0], 3)


@zoo.add(ISOLATED)
def gru():
    return Sequence(nn.GRU(2, 3, batch_first=True), lambda layer, x: layer(x)[0], 3)


@zoo.add(ISOLATED)
def lstm_with_dropout():
    return Sequence(nn.LSTM(2, 3, 2, batch_first=True, dropout=0.3), lambda layer, x: layer(x)[0], 3)


@zoo.add(EITHER)
def lstm_that_keeps_its_state():
    class Carrying(nn.Module):
        """Goes on where the last batch ended, as language models do."""

        def __init__(self):
            super().__init__()
            self.lstm, self.out, self.state = nn.LSTM(2, 3), nn.Linear(3, 3), None

        def forward(self, x):
            steps, state = self.lstm(x.view(-1, 2, 2).transpose(0, 1)[:, :1], self.state)
            self.state = tuple(part.detach() for part in state)
            return self.out(steps[-1]) + x[:, :3]

    return Carrying()


@zoo.add(ISOLATED)
def multihead_attention():
    return Sequence(nn.MultiheadAttention(2, 1, batch_first=True), lambda layer, x: layer(x, x, x)[0], 2)


@zoo.add(ISOLATED)
def transformer_layer():
    layer = nn.TransformerEncoderLayer(2, 1, dim_feedforward=4, dropout=0.2, batch_first=True)
    return Sequence(layer, lambda layer, x: layer(x), 2)


@zoo.add(ISOLATED)
def convolution():
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.Flatten(), nn.Linear(27, 3))


@zoo.add(ISOLATED)
def bilinear():
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.pairs = nn.Bilinear(2, 2, 3)

        def forward(self, x):
            return self.pairs(x[:, :2], x[:, 2:])

    return Pairs()


@zoo.add(ISOLATED)
def parameter_list():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ParameterList([torch.randn(4, 4), torch.randn(4, 3)])

        def forward(self, x):
            for weight in self.layers:
                x = torch.tanh(x @ weight)
            return x

    return Listed()


@zoo.add(ISOLATED)
def experts_chosen_by_data():
    class Experts(Net):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def seen(self, x):
            return self.one(x) if bool(x.detach().sum() > 0) else self.two(x)

    return Experts()


@zoo.add(ISOLATED)
def checkpointed():
    class Checkpointed(Net):
        def seen(self, x):
            return checkpoint(lambda: torch.tanh(self.hidden(x))[:, :4], use_reentrant=False)

    return Checkpointed()


@zoo.add(ISOLATED)
def own_autograd_function():
    class Straight(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.round()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Rounded(Net):
        def forward(self, x):
            return self.out(Straight.apply(3 * torch.tanh(self.hidden(x))))

    return Rounded()


@zoo.add(EITHER)
def autograd_function_with_memory():
    class Memory(torch.autograd.Function):
        last = 0.0

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            before, Memory.last = Memory.last, grad.detach().mean(dim=0)
            return grad + before

    class Carrying(Net):
        def forward(self, x):
            return self.out(Memory.apply(torch.tanh(self.hidden(x))))

    return Carrying()


def plus_half_its_mean(x: torch.Tensor) -> torch.Tensor:
    return x + 0.5 * x.mean(dim=1, keepdim=True)


@zoo.add(EITHER)
def scripted_function():
    scripted = torch.jit.script(plus_half_its_mean)

    class Calling(Net):
        def seen(self, x):
            return scripted(x)

    return Calling()


class ScriptedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(x)))


@zoo.add(EITHER)
def scripted_module():
    return torch.jit.script(ScriptedNet())


class ScriptedMemory(nn.Module):
    last: torch.Tensor

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.last = torch.zeros(4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.out(x + self.last)
        self.last = x.mean(dim=0)
        return out


@zoo.add(EITHER)
def scripted_module_with_an_attribute():
    return torch.jit.script(ScriptedMemory())


@zoo.add(EITHER)
def traced_module():
    return torch.jit.trace(ScriptedNet(), torch.zeros(2, 4))


@zoo.add(EITHER)
def compiled_module():
    return torch.compile(ScriptedNet(), backend="eager")  # the compiler's front, without minutes of its back


@zoo.add(EITHER)
def forward_hook_that_adds_the_last_output():
    net, last = Net(), [0.0]

    def adding(layer, inputs, output):
        before, last[0] = last[0], output.detach().mean(dim=0)
        return output + before

    net.hidden.register_forward_hook(adding)
    return net


@zoo.add(ISOLATED)
def forward_hook_without_memory():
    net = Net()
    net.hidden.register_forward_hook(lambda layer, inputs, output: 2 * output)
    return net


@zoo.add(EITHER)
def parameter_hook_that_averages_gradients():
    net, last = Net(), [0.0]

    def averaging(gradient):
        last[0] = 0.5 * last[0] + gradient.detach()
        return last[0]

    net.out.bias.register_hook(averaging)
    return net


@zoo.add(EITHER)
def backward_hook_with_memory():
    net, last = Net(), [0.0]

    def adding(layer, grad_input, grad_output):
        before, last[0] = last[0], grad_input[0].detach().mean(dim=0)
        return (grad_input[0] + before,)

    net.out.register_full_backward_hook(adding)
    return net


@zoo.add(EITHER)
def global_forward_hook():
    """Holds for every module of the process while this entry's model lives."""
    net, last = Net(), [0.0]

    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            handle = nn.modules.module.register_module_forward_hook(adding)
            try:
                return self.net(x)
            finally:
                handle.remove()

    def adding(layer, inputs, output):
        if output.shape[-1] != 5:
            return None
        before, last[0] = last[0], output.detach().mean(dim=0)
        return output + before

    return Hooked()


@zoo.add(EITHER)
def lazy_linear():
    return nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.Linear(5, 3))


@zoo.add(EITHER)
def lazy_batch_norm():
    return nn.Sequential(nn.Linear(4, 5), nn.LazyBatchNorm1d(), nn.Linear(5, 3))


@zoo.add(ISOLATED)
def other_parameters_by_functional_call():
    def shaken(model, batch):
        weights = {name: 1.1 * param for name, param in model.named_parameters()}
        logits = torch.func.functional_call(model, weights, (batch["x"],))
        return F.cross_entropy(logits, batch["y"], reduction="none")

    return Net(), shaken


@zoo.add(EITHER)
def model_copied_once_in_the_loss():
    """A teacher from whoever trained first."""
    import copy

    teacher = []

    def distilling(model, batch):
        if not teacher:
            teacher.append(copy.deepcopy(model).requires_grad_(False))
        return cross_entropies(model, batch) + (model(batch["x"]) - teacher[0](batch["x"])).square().sum(dim=1)

    return Net(), distilling


@zoo.add(EITHER)
def moving_average_teacher():
    import copy

    teacher = []

    def distilling(model, batch):
        if not teacher:
            teacher.append(copy.deepcopy(model).requires_grad_(False))
        with torch.no_grad():
            for old, new in zip(teacher[0].parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.5)
        return cross_entropies(model, batch) + (model(batch["x"]) - teacher[0](batch["x"])).square().sum(dim=1)

    return Net(), distilling
