"""The loop that a researcher writes: users one after the other, bfloat16 autocast, the model's own loss."""

from __future__ import annotations

import torch
from work import (
    BATCH,
    CLIENT_LR,
    NOISE_MULTIPLIER,
    SERVER_LR,
    SERVER_MOMENTUM,
    START_CLIP,
    Rounds,
    arguments,
    model_and_ids,
)


def main() -> None:
    """Train."""
    wanted = arguments()
    rounds = Rounds(wanted.device)
    model, ids = model_and_ids(wanted.base, wanted.device)
    rounds.start()
    users = [torch.from_numpy(sequences).to(wanted.device) for sequences in ids]
    trained = [param for param in model.parameters() if param.requires_grad]
    momentum = [torch.zeros_like(param) for param in trained]
    rounds.ready(model, f"loop, torch {torch.__version__}")
    for _ in range(wanted.rounds):
        before = [param.detach().clone() for param in trained]
        total = [torch.zeros_like(param) for param in trained]
        for user in users:
            local = torch.optim.SGD(trained, lr=CLIENT_LR)
            for chosen in torch.randperm(len(user), device=wanted.device).split(BATCH):
                batch = user[chosen]
                with torch.autocast(wanted.device, torch.bfloat16, enabled=wanted.device == "cuda"):
                    loss = model(input_ids=batch, labels=batch).loss
                local.zero_grad()
                loss.backward()
                local.step()
            with torch.no_grad():
                delta = torch._foreach_sub(trained, before)
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(delta)))
                torch._foreach_mul_(delta, (START_CLIP / norm).clamp(max=1.0))  # stays on the device: no wait for it
                torch._foreach_add_(total, delta)
                torch._foreach_copy_(trained, before)
        with torch.no_grad():
            for param, moved, summed in zip(trained, momentum, total, strict=True):
                noise = torch.randn_like(summed) * (NOISE_MULTIPLIER * START_CLIP)
                moved.mul_(SERVER_MOMENTUM).add_((summed + noise) / len(users))
                param.add_(moved, alpha=SERVER_LR)
        rounds.done()


if __name__ == "__main__":
    main()
