"""Ordinary and unusual architectures: tied, frozen, recurrent, scripted, compiled, hooked."""

import copy

import torch
from adversarial.entry import EITHER, ISOLATED, Net, Zoo, cross_entropies, mean
from torch import nn

zoo = Zoo()


@zoo.add(ISOLATED)
def norms_of_an_example():
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3))


@zoo.add(ISOLATED)
def tied_weights():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    model[2].weight = model[0].weight
    return model


@zoo.add(ISOLATED)
def frozen_base():
    net = Net()
    net.hidden.requires_grad_(False)
    return net


@zoo.add(ISOLATED)
def embedding_with_padding():
    class Looking(nn.Module):
        """Features to places in a table."""

        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(8, 2, padding_idx=3), nn.Linear(2, 3)

        def forward(self, x):
            places = (x.nan_to_num().clamp(-1.9, 1.9) * 2 + 4).long()
            return self.out(self.table(places).mean(dim=1))

    return Looking()


class Sequence(nn.Module):
    """The features as 2 steps of 2, a recurrence or attention over them, and 3 classes."""

    def __init__(self, layer, width):
        super().__init__()
        self.layer, self.out, self.state = layer, nn.Linear(width, 3), None

    def forward(self, x):
        steps = self.layer(x.view(-1, 2, 2))
        return self.out((steps[0] if isinstance(steps, tuple) else steps)[:, -1])


@zoo.add(ISOLATED)
def lstm():
    return Sequence(nn.LSTM(2, 3, batch_first=True), 3)


@zoo.add(EITHER)
def lstm_that_keeps_its_state():
    class Carrying(Sequence):
        """Goes on where the last batch ended, as language models do."""

        def forward(self, x):
            steps, state = self.layer(x.view(-1, 2, 2).transpose(0, 1)[:, :1], self.state)
            self.state = tuple(part.detach() for part in state)
            return self.out(steps[-1]) + x[:, :3]

    return Carrying(nn.LSTM(2, 3), 3)


@zoo.add(ISOLATED)
def transformer_layer():
    return Sequence(nn.TransformerEncoderLayer(2, 1, dim_feedforward=4, dropout=0.2, batch_first=True), 2)


@zoo.add(ISOLATED)
def convolution():
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.Flatten(), nn.Linear(27, 3))


@zoo.net(ISOLATED)
def layer_chosen_by_data(self, x):
    return self.hidden(x)[:, :4] if bool(x.detach().sum() > 0) else x


class ScriptedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(x)))


@zoo.add(EITHER)
def scripted_module():
    return torch.jit.script(ScriptedNet())


@zoo.add(EITHER)
def compiled_module():
    return torch.compile(ScriptedNet(), backend="eager")  # the compiler's front, without minutes of its back


@zoo.add(EITHER)
def forward_hook_that_adds_the_last_output():
    net, last = Net(), [0.0]

    def adding(layer, inputs, output):
        before, last[0] = last[0], mean(output)
        return output + before

    net.hidden.register_forward_hook(adding)
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
def moving_average_teacher():
    teacher = []

    def distilling(model, batch):
        if not teacher:
            teacher.append(copy.deepcopy(model).requires_grad_(False))
        with torch.no_grad():
            for old, new in zip(teacher[0].parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.5)
        return cross_entropies(model, batch) + (model(batch["x"]) - teacher[0](batch["x"])).square().sum(dim=1)

    return Net(), distilling
