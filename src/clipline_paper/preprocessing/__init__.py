"""From raw examples to the numbers that the paper's tasks read.

Begin with `text`, which encodes one example; `tokenisers` applies it to chunks; `pachinko` assigns images to users.
"""
