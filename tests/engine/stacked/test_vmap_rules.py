"""What a user gets from each of torch's operations in a stack is what that user gets alone, whoever the others are.

torch has a rule for each operation under `vmap`, and some rules mix users up. Every operation here runs in stacks of
three, of whom some have ties, zeros, NaN, numbers near overflow or a number out of range, in both orders.
"""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, vmap

from clipline.engine.stacked.vmap_layers import Bypass, StackSafe

L = torch.linalg
DOUBLE = torch.float64
CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.0], dtype=DOUBLE)
EYE = torch.eye(3, dtype=DOUBLE)
SHARED = torch.tensor([0, 2, 2, 3])
SCORES = "w:4,3 x:5,3"  # w: a parameter, x: an example's numbers
LABELS = SCORES + " t:5<4"  # t: whole numbers from 0 to 3
TARGETS = SCORES + " y:5,4"
OPERATIONS = {}
PARAMETERS = {}  # of layers; the others' are w, v and b


def words(text):
    return text.split()


def add(name, arguments, function):
    assert name not in OPERATIONS
    OPERATIONS[name] = (arguments, function)


def layer(name, module, arguments, call=lambda module, x: module(x)):
    module = module.double()
    shapes = {key.replace(".", "_"): (key, param.shape) for key, param in module.named_parameters()}

    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, **given):
            return call(self.module, **given)

    def function(**given):
        params = {f"module.{shapes[key][0]}": given.pop(key) for key in shapes}
        return functional_call(Called(), params, (), given)

    params = " ".join(f"{key}:{','.join(map(str, shape))}" for key, (_, shape) in shapes.items())
    PARAMETERS[name] = set(shapes)
    add(name, f"{params} {arguments}", function)


for how in ("none", "mean", "sum"):
    for ignored in (-100, 1):
        for weights in (None, CLASS_WEIGHTS):
            setting = {"weight": weights, "ignore_index": ignored, "reduction": how}
            note = f"{ignored} {how}{'' if weights is None else ' weighted'}"
            add(f"cross_entropy {note}", LABELS, lambda w, x, t, a=setting: F.cross_entropy(x @ w.T, t, **a))
            add(f"nll_loss {note}", LABELS, lambda w, x, t, a=setting: F.nll_loss((x @ w.T).log_softmax(1), t, **a))
            add(f"nll_loss 2d {note}", "w:2,4,3 t:2,3<4", lambda w, t, a=setting: F.nll_loss(w.log_softmax(1), t, **a))
        soft, note = {"ignore_index": ignored, "label_smoothing": 0.1, "reduction": how}, f"smoothed {ignored} {how}"
        add(f"cross_entropy {note}", LABELS, lambda w, x, t, a=soft: F.cross_entropy(x @ w.T, t, **a))
    for loss in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        add(f"{loss} {how}", TARGETS, lambda w, x, y, f=loss, r=how: getattr(F, f)(x @ w.T, y, reduction=r))
    for name, function in {
        "cross_entropy of shares": lambda s, y, r: F.cross_entropy(s, y.softmax(1), CLASS_WEIGHTS, reduction=r),
        "poisson_nll_loss": lambda s, y, r: F.poisson_nll_loss(s, y.abs(), full=True, reduction=r),
        "binary_cross_entropy": lambda s, y, r: F.binary_cross_entropy(s.sigmoid(), y.sigmoid(), y.abs(), reduction=r),
        "bce_with_logits": lambda s, y, r: F.binary_cross_entropy_with_logits(
            s, y.sigmoid(), y.abs(), pos_weight=CLASS_WEIGHTS, reduction=r
        ),
        "hinge_embedding_loss": lambda s, y, r: F.hinge_embedding_loss(s, y.sign(), reduction=r),
        "multilabel_soft_margin_loss": lambda s, y, r: F.multilabel_soft_margin_loss(s, y.sigmoid(), reduction=r),
        "cosine_embedding_loss": lambda s, y, r: F.cosine_embedding_loss(s, y, y[:, 0].sign(), reduction=r),
        "triplet with distance": lambda s, y, r: F.triplet_margin_with_distance_loss(s, y, s.flip(0), reduction=r),
    }.items():
        add(f"{name} {how}", TARGETS, lambda w, x, y, f=function, r=how: f(x @ w.T, y, r))
add("cross_entropy weighted by data", LABELS + " x2:4", lambda w, x, t, x2: F.cross_entropy(x @ w.T, t, x2.abs()))
add("cross_entropy of one example", "w:4,3 x:3 t:<4", lambda w, x, t: F.cross_entropy(w @ x, t, ignore_index=1))

add("embedding", "w:6,4 t:2,3<6", lambda w, t: F.embedding(t, w))
add("embedding with padding", "w:6,4 t:2,3<6", lambda w, t: F.embedding(t, w, padding_idx=1))
add("embedding with last padding", "w:6,4 t:2,3<6", lambda w, t: F.embedding(t, w, padding_idx=-1))
add("embedding of shared numbers", "w:6,4", lambda w: F.embedding(SHARED, w, padding_idx=2))
add("embedding of one number", "w:6,4 t:<6", lambda w, t: F.embedding(t, w, padding_idx=1))
add("embedding of a constant", "w:3,4 t:2,3<3", lambda w, t: F.embedding(t, EYE, padding_idx=1) @ w)
add("torch.embedding", "w:6,4 t:2,3<6", lambda w, t: torch.embedding(w, t))
add("torch.embedding with padding", "w:6,4 t:2,3<6", lambda w, t: torch.embedding(w, t, 1))
layer("nn.Embedding", nn.Embedding(6, 3, padding_idx=1), "t:2,3<6", lambda module, t: module(t))
add("index_select", "w:5,4 t:6<5", lambda w, t: w.index_select(0, t))
add("index_select of a constant", "w:3,4 t:6<3", lambda w, t: EYE.index_select(0, t) @ w)
add("w[t]", "w:5,4 t:6<5", lambda w, t: w[t])
add("w[:, t]", "w:5,4 t:6<4", lambda w, t: w[:, t])
add("w[t, u]", "w:5,4 t:6<5 u:6<4", lambda w, t, u: w[t, u])
add("w[t, :, u]", "w:5,3,4 t:6<5 u:6<4", lambda w, t, u: w[t, :, u])
add("constant[t]", "w:3,4 t:6<3", lambda w, t: EYE[t] @ w)
add("gather", "w:5,4 t:5,2<4", lambda w, t: w.gather(1, t))
add("take_along_dim", "w:5,4 t:5,2<4", lambda w, t: w.take_along_dim(t, 1))
add("scatter", "w:5,4 t:5,1<4 v:5,1", lambda w, t, v: w.scatter(1, t, v))
add("scatter_add", "w:5,4 t:5,6<4 v:5,6", lambda w, t, v: w.scatter_add(1, t, v))
add("scatter_add to a constant", "t:3,6<3 v:3,6", lambda t, v: EYE.scatter_add(1, t, v))
for kind in ("sum", "prod", "mean", "amax"):
    add(f"scatter_reduce {kind}", "w:5,4 t:5,6<4 v:5,6", lambda w, t, v, kind=kind: w.scatter_reduce(1, t, v, kind))
add("index_add", "w:5,4 t:6<5 v:6,4", lambda w, t, v: w.index_add(0, t, v))
add("index_add of shared places", "w:5,4 v:4,4", lambda w, v: w.index_add(0, SHARED, v))
add("index_copy", "w:5,4 t:1<5 v:1,4", lambda w, t, v: w.index_copy(0, t, v))
add("index_fill", "w:5,4 t:2<5", lambda w, t: w.index_fill(0, t - 1, 2.0))
add("index_fill in place", "w:5,4 t:2<5", lambda w, t: w.clone().index_fill_(0, t - 1, 2.0))
add("index_fill of shared places", "w:5,4", lambda w: w.index_fill(0, SHARED - 1, 2.0))
add("index_fill of shared places in place", "w:5,4", lambda w: w.clone().index_fill_(0, SHARED - 1, 2.0))
add("index_put", "w:5,4 t:6<5 v:6,4", lambda w, t, v: w.index_put((t,), v, accumulate=True))
add("masked_fill", "w:5,4 m:5,4", lambda w, m: w.masked_fill(m, -math.inf).softmax(-1))  # m: true or false
add("where", "w:5,4 v:5,4 m:5,4", lambda w, v, m: torch.where(m, w, v))
add("select_scatter", "w:5,4 v:4", lambda w, v: w.select_scatter(v, 0, 1))
add("select_scatter from the end", "w:5,4 v:5", lambda w, v: torch.select_scatter(w, v, -1, -1))
add("slice_scatter", "w:5,4 v:2,4", lambda w, v: w.slice_scatter(v, 0, 1, 3))
add("diagonal_scatter", "w:5,4 v:4", lambda w, v: w.diagonal_scatter(v))
add("one_hot", "w:4,3 t:5<4", lambda w, t: F.one_hot(t, 4).double() @ w)
add("searchsorted", "w:6 x:6 x2:5", lambda w, x, x2: w[torch.searchsorted(x2.sort().values, x)])

for name in words("sum mean prod amax amin std var norm nansum max min median nanmedian"):
    add(f"{name}()", "w:3,4", lambda w, f=name: getattr(torch, f)(w))
for name in words(
    "sum mean prod amax amin max min median std var norm nansum logsumexp cumsum cumprod cummax logcumsumexp sort mode "
    "softmax log_softmax argmax"
):
    for dim in (0, -1):
        add(f"{name}({dim})", "w:3,4", lambda w, f=name, dim=dim: getattr(torch, f)(w, dim=dim))
add("prod of data", "w:3 x:3", lambda w, x: (w * x).prod())
add("prod with an axis kept", "w:3,4", lambda w: torch.prod(w, 1, keepdim=True))
add("prod of a number", "w:", lambda w: w.prod())
add("topk", "w:6", lambda w: w.topk(3))
add("topk of data", "w:50 x:50", lambda w, x: w[x.topk(3).indices])
add("kthvalue", "w:6,3", lambda w: w.kthvalue(2, 0))
add("sorted by data", "w:50 x:50", lambda w, x: w[x.argsort()] * torch.arange(50))
for p in (0, 1, 2, 3, math.inf):
    add(f"vector_norm {p}", "w:3,4", lambda w, p=p: L.vector_norm(w, p, dim=0))
    add(f"normalize {p}", "w:3,4", lambda w, p=p: F.normalize(w, p))
    add(f"cdist {p}", "w:3,4 x:5,4", lambda w, x, p=p: torch.cdist(w, x, p))
    add(f"pairwise_distance {p}", "w:3,4 x:3,4", lambda w, x, p=p: F.pairwise_distance(w, x, p))
add("cosine_similarity", "w:3,4 x:3,4", lambda w, x: F.cosine_similarity(w, x))

for n, sides in ((1, "7"), (2, "5,4"), (3, "3,4,4")):
    kernel = ",".join("2" * n)
    conv, transposed = getattr(F, f"conv{n}d"), getattr(F, f"conv_transpose{n}d")
    for groups in (1, 2):
        kernels = f"w:4,{4 // groups},{kernel}"
        some, far = {"groups": groups, "stride": 2, "padding": 1}, {"groups": groups, "dilation": 2}
        add(f"conv{n}d {groups}", f"{kernels} b:4 x:2,4,{sides}", lambda w, b, x, f=conv, a=some: f(x, w, b, **a))
        add(f"conv{n}d dilated {groups}", f"{kernels} x:4,{sides}", lambda w, x, f=conv, a=far: f(x, w, **a))
        add(f"conv_transpose{n}d {groups}", f"{kernels} x:2,4,{sides}", lambda w, x, f=transposed, a=some: f(x, w, **a))
    for name in ("avg_pool", "max_pool"):
        pool = getattr(F, f"{name}{n}d")
        add(f"{name}{n}d", f"w:2,3,{sides}", lambda w, f=pool: f(w, 2, 2, 1, ceil_mode=True))
    for name in ("adaptive_avg_pool", "adaptive_max_pool"):
        add(f"{name}{n}d", f"w:2,3,{sides}", lambda w, f=f"{name}{n}d": getattr(F, f)(w, 2))
    for mode in ("reflect", "replicate", "circular"):
        add(f"pad {n} {mode}", f"w:2,3,{sides}", lambda w, n=n, mode=mode: F.pad(w, (1, 2) * n, mode))
sides_of = {"nearest": "5,4", "linear": "5", "bilinear": "5,4", "bicubic": "5,4", "trilinear": "3,4,4"}
for mode, sides in sides_of.items():
    add(f"interpolate {mode}", f"w:2,3,{sides}", lambda w, mode=mode: F.interpolate(w, scale_factor=1.7, mode=mode))
add("grid_sample", "w:2,3,5,4 v:2,3,3,2", lambda w, v: F.grid_sample(w, v, align_corners=False))
add("pixel_shuffle", "w:2,8,3,3", lambda w: F.pixel_shuffle(w, 2))
add("unfold", "w:2,3,5,4", lambda w: F.unfold(w, 2, padding=1))
add("fold", "w:2,12,9", lambda w: F.fold(w, (4, 4), 2))

add("batch_norm", "w:3 b:3 x:4,3", lambda w, b, x: F.batch_norm(x, None, None, w, b, True))
add("batch_norm of parameters", "w:4,3,2", lambda w: F.batch_norm(w, None, None, None, None, True))
add("instance_norm", "w:3 b:3 x:2,3,4", lambda w, b, x: F.instance_norm(x, None, None, w, b))
add("layer_norm", "w:4 b:4 v:3,4", lambda w, b, v: F.layer_norm(v, (4,), w, b))
add("group_norm", "w:4 b:4 v:2,4,3", lambda w, b, v: F.group_norm(v, 2, w, b))
add("rms_norm", "w:4 v:3,4", lambda w, v: F.rms_norm(v, (4,), w))
add("local_response_norm", "w:2,5,4", lambda w: F.local_response_norm(w, 3))
add("attention", "w:2,5,4 v:2,5,4", lambda w, v: F.scaled_dot_product_attention(w, v, v, is_causal=True))
add("attention, masked", "w:2,5,4 m:2,5,5", lambda w, m: F.scaled_dot_product_attention(w, w, w, m))
add("attention of heads", "w:2,2,5,4", lambda w: F.scaled_dot_product_attention(w, w, w))
attention = F.scaled_dot_product_attention
shared = "w:2,4,5,4 v:2,2,5,4 m:2,1,5,5"
add("attention of shared heads", shared, lambda w, v, m: attention(w, v, v, m, scale=0.3, enable_gqa=True))
layer("MultiheadAttention", nn.MultiheadAttention(4, 2), "x:5,2,4", lambda module, x: module(x, x, x))
biased = nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True)
layer("MultiheadAttention, masked", biased, "x:2,5,4 m:2,5", lambda module, x, m: module(x, x, x, key_padding_mask=m))
layer("PReLU", nn.PReLU(3), "x:2,3,4")
layer("orthogonal", nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)), "x:5,3")
add("prelu of parameters", "w:3 v:2,3,4", lambda w, v: F.prelu(v, w))
for name in words("relu relu6 leaky_relu gelu silu mish hardsigmoid hardtanh softplus softsign tanhshrink glu"):
    add(name, "w:3,4", lambda w, f=name: getattr(F, f)(w))
for name in words("abs exp log log1p sqrt rsqrt sin erf sigmoid sign nan_to_num lgamma sinc"):
    add(name, "w:3,4", lambda w, f=name: getattr(torch, f)(w))
for name in words("add mul div pow maximum fmin atan2 hypot remainder logaddexp xlogy"):
    add(name, "w:3,4 x:4", lambda w, x, f=name: getattr(torch, f)(w, x))
add("clamp", "w:3,4 v:4 x:4", lambda w, v, x: torch.clamp(w, v, x))
for name, function in {
    "roll": lambda w: w.roll(1),
    "roll along two": lambda w: w.roll((1, 2), (0, 1)),
    "flip": lambda w: w.flip(0),
    "tril": lambda w: w.tril(-1),
    "diagonal": lambda w: w.diagonal(1),
    "diag_embed": lambda w: torch.diag_embed(w),
    "unfold along": lambda w: w.unfold(1, 2, 1),
    "repeat_interleave": lambda w: w.repeat_interleave(2, 1),
    "as_strided": lambda w: w.as_strided((2, 2), (3, 1), 1),
    "einsum": lambda w: torch.einsum("ij,jk->ki", w, w),
    "kron": lambda w: torch.kron(w, w),
    "fft": lambda w: torch.fft.rfft(w).abs(),
    "inv": lambda w: L.inv(w @ w.mT + EYE),
    "det": lambda w: L.det(w),
    "slogdet": lambda w: L.slogdet(w @ w.mT + EYE),
    "cholesky": lambda w: L.cholesky(w @ w.mT + EYE),
    "svdvals": lambda w: L.svdvals(w),
    "eigvalsh": lambda w: L.eigvalsh(w @ w.mT + EYE),
    "matrix_exp": lambda w: L.matrix_exp(w.tanh()),
    "matrix_norm": lambda w: L.matrix_norm(w, 1),
    "cov": lambda w: torch.cov(w),
    "gradient inside": lambda w: torch.func.grad(lambda w: w.sin().prod())(w),
}.items():
    add(name, "w:3,3", function)
add("solve", "w:3,3 v:3,3", lambda w, v: L.solve(w @ w.mT + EYE, v))
add("solve for a vector", "w:3,3 v:3", lambda w, v: L.solve(w @ w.mT + EYE, v))
add("solve_triangular", "w:3,3 v:3,2", lambda w, v: L.solve_triangular(w.tanh() + EYE, v, upper=True))
add("addmm", "w:3,4 x:2,3 b:4", lambda w, x, b: torch.addmm(b, x, w))
add("baddbmm", "w:2,3,4 x:2,4,5 b:3,5", lambda w, x, b: torch.baddbmm(b, w, x, beta=0.5))

# Refused, by torch or by the engine: users train one by one.
soft = {"weight": CLASS_WEIGHTS, "label_smoothing": 0.1}
add("cross_entropy smoothed, weighted", LABELS, lambda w, x, t: F.cross_entropy(x @ w.T, t, **soft))
add("embedding with max_norm", "w:6,4 t:2,3<6", lambda w, t: F.embedding(t, w * 1, max_norm=0.5))
add("embedding scaled by frequency", "w:6,4 t:2,3<6", lambda w, t: F.embedding(t, w, scale_grad_by_freq=True))
for kind in ("sum", "mean", "max"):
    bag = {"mode": kind, "padding_idx": 1}
    add(f"embedding_bag {kind}", "w:6,4 t:3,3<6", lambda w, t, bag=bag: F.embedding_bag(t, w, **bag))
add("multi_margin_loss", LABELS, lambda w, x, t: F.multi_margin_loss(x @ w.T, t))
add("multilabel_margin_loss", SCORES + " t:5,4<4", lambda w, x, t: F.multilabel_margin_loss(x @ w.T, t))
add("kl_div", TARGETS, lambda w, x, y: F.kl_div((x @ w.T).log_softmax(1), y.softmax(1), reduction="batchmean"))
add("gaussian_nll_loss", TARGETS, lambda w, x, y: F.gaussian_nll_loss(x @ w.T, y, y.abs()))
add("triplet_margin_loss", TARGETS, lambda w, x, y: F.triplet_margin_loss(x @ w.T, y, y.flip(0)))
add("ctc_loss", "w:6,2,5 t:2,3<5", lambda w, t: F.ctc_loss(w.log_softmax(2), t, [6, 6], [3, 2], blank=4))
add("take", "w:5,4 t:6<20", lambda w, t: w.take(t))
add("put", "w:5,4 t:1<20 v:1", lambda w, t, v: w.put(t, v))
add("masked_scatter", "w:5,4 v:5,4 m:5,4", lambda w, v, m: w.masked_scatter(m, v))
add("quantile", "w:6", lambda w: w.quantile(0.3))
add("renorm", "w:3,4", lambda w: w.renorm(2, 0, 1.0))
add("pdist", "w:5,4", lambda w: F.pdist(w))
add("max_unpool2d", "w:1,1,4,4", lambda w: F.max_unpool2d(*F.max_pool2d(w, 2, return_indices=True), 2))
layer("LSTM", nn.LSTM(3, 4), "x:5,2,3")
layer("GRU", nn.GRU(3, 4), "x:5,2,3")
layer("Bilinear", nn.Bilinear(3, 4, 2), "x:5,3 y:5,4", lambda module, x, y: module(x, y))
layer("weight_norm", nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), "x:5,3")
layer("TransformerEncoderLayer", nn.TransformerEncoderLayer(4, 2, 8, 0.0), "x:5,2,4")

REFUSED = list(OPERATIONS)[list(OPERATIONS).index("cross_entropy smoothed, weighted") :]
REFUSED += ["index_fill"]
# What torch alone does wrongly in a stack, and the engine does otherwise. Where torch changes, its replacement may go.
MIXED_UP_BY_TORCH = [
    "embedding",  # a number out of range is another user's row
    "embedding with padding",
    "embedding with last padding",
    "embedding of one number",
    "torch.embedding",
    "torch.embedding with padding",
    "nn.Embedding",
    "index_fill",  # -1 is the last place of the user before
    "prod()",
    "prod(-1)",
]
WRONG_FOR_ALL = ["select_scatter", "select_scatter from the end"]
# Alone, the gradient is shared among equal elements; in a stack one of them gets it, and it is the same at every place.
TIES_OTHERWISE = ["max()", "min()", "median()", "nanmedian()"]
# Alone, torch's fused kernel rounds numbers near 1e90 otherwise than plain products, as "attention" above, do.
FUSED_OTHERWISE = ["attention of heads", "attention of shared heads"]
UNNOTICED = ["one_hot"]  # a number out of range is a row of zeros in a stack, and an error alone
KINDS = [("plain", "ties", "nan"), ("zeros", "plain", "edge"), ("ones", "plain", "outside")]


def numbers(name, kind, seed):
    """A user's tensors by name: each number is drawn, and then some are what the kind says."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for text in OPERATIONS[name][0].split():
        key, shape = text.split(":")
        shape, _, bound = shape.partition("<")
        shape = tuple(int(side) for side in shape.split(",") if side)
        if bound:
            tensor = torch.randint(int(bound), shape, generator=generator)
            if kind in ("zeros", "ones"):
                tensor.fill_(kind == "ones")
            if kind == "outside":
                tensor.view(-1)[-1] = int(bound)
        elif key == "m":
            tensor = torch.rand(shape, generator=generator) < (1.0 if kind == "ones" else 0.5)
        else:
            tensor = torch.randn(shape, generator=generator, dtype=DOUBLE)
            flat = tensor.view(-1)
            if kind == "ties":
                tensor.sign_()
            elif kind == "zeros":
                flat[::2] = 0
            elif kind == "edge":  # their product underflows, and that of all but one does not
                flat[: flat.numel() // 2] *= 1e-90
                flat[flat.numel() // 2 :] *= 1e90
            elif kind == "nan" and key.startswith(("x", "y")):
                flat[0] = math.nan
        tensors[key] = tensor
    return tensors


def gradients(name, users, losses_of):
    """Of every user's loss in that user's parameters, flat: (users, dim)."""
    params, function = PARAMETERS.get(name, {"w", "v", "b"}), OPERATIONS[name][1]
    given = {key: torch.stack([user[key] for user in users]) for key in users[0]}
    leaves = [given[key].requires_grad_() for key in given if key in params]

    def loss(given):
        return weighed(function(**given))

    found = torch.autograd.grad(losses_of(loss, given).sum(), leaves, allow_unused=True)
    found = [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]
    return torch.cat([one.flatten(1) for one in found], dim=1)


def weighed(out):
    """One number of all that an operation gives, each with a weight of its own."""
    if not isinstance(out, torch.Tensor):
        return sum(weighed(one) for one in out if one is not None)
    places = torch.arange(out.numel(), dtype=DOUBLE).reshape(out.shape)
    return (out * (places.cos() + 0.1)).sum()


def alone(loss, given):
    (only,) = [{key: tensor[0] for key, tensor in given.items()}]
    return loss(only)[None]


def bare(loss, given):
    return vmap(loss, randomness="error")(given)


def safe(loss, given):
    def watched(given):
        with StackSafe() as mode:
            value = loss(given)
        return value * (1 + mode.spoiled(value.new_zeros(())))  # as a step's rates do with its gradient

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop.*")
        return bare(watched, given)


def by_themselves(name, user):
    """The gradient of a user alone; None where that is an error, for then the user adds nothing."""
    try:
        return gradients(name, [user], alone)[0]
    except (IndexError, RuntimeError):
        return None


def same(one, other):
    """Both add nothing, or both the same but for rounding."""
    if one is None or not one.isfinite().all():
        return not other.isfinite().all()
    return bool(torch.allclose(one, other, rtol=1e-9, atol=1e-9 * float(one.abs().max())))


def differing(name, losses_of):
    """The users, by kind and place, who get another gradient in a stack than alone; a stack that fails has none."""
    found = []
    for kinds in KINDS:
        users = [numbers(name, kind, seed) for seed, kind in enumerate(kinds)]
        expected = [by_themselves(name, user) for user in users]
        for order in ([0, 1, 2], [2, 1, 0]):
            try:
                stack = gradients(name, [users[place] for place in order], losses_of)
            except (IndexError, RuntimeError):
                if all(one is not None for one in expected):
                    raise
                continue  # every user trains apart then
            found += [(kinds[i], order) for at, i in enumerate(order) if not same(expected[i], stack[at])]
    return found


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in REFUSED])
def test_in_a_stack_every_user_gets_what_the_user_gets_alone(name):
    kinds = {kind for kind, _ in differing(name, safe)}
    if name in TIES_OTHERWISE:
        assert kinds <= {"ties", "zeros"}
    elif name in FUSED_OTHERWISE:
        assert kinds <= {"edge"}
    elif name in UNNOTICED:
        assert kinds == {"outside"}
    else:
        assert not kinds


@pytest.mark.parametrize("name", REFUSED)
def test_an_operation_without_a_version_for_a_stack_is_refused(name):
    users = [numbers(name, "plain", seed) for seed in range(3)]
    assert by_themselves(name, users[0]) is not None
    with pytest.raises((NotImplementedError, RuntimeError, UserWarning)):
        gradients(name, users, safe)


@pytest.mark.parametrize("name", MIXED_UP_BY_TORCH)
def test_torch_still_mixes_these_up_so_that_they_must_be_replaced(name):
    kinds = {kind for kind, _ in differing(name, bare)}
    assert kinds & {"plain", "edge"}  # who has done nothing unusual, or is moved by another's zero


@pytest.mark.parametrize("name", WRONG_FOR_ALL)
def test_torch_still_gives_every_user_of_a_stack_a_wrong_gradient_here(name):
    assert len(differing(name, bare)) == 18


@pytest.mark.parametrize("name", TIES_OTHERWISE)
def test_who_gets_the_gradient_among_equals_does_not_depend_on_the_others(name):
    users = [numbers(name, kind, seed) for seed, kind in enumerate(("plain", "ties", "zeros"))]
    forward = gradients(name, users, safe)
    assert torch.equal(forward, gradients(name, users[::-1], safe).flip(0))
    assert torch.equal(forward[1], gradients(name, users[1:2], safe)[0])


class Found(torch.autograd.Function):
    """Rows of a weight, looked up behind the replacements. torch makes its rule for many users."""

    generate_vmap_rule = True

    @staticmethod
    def forward(t, w):
        return F.embedding(t, w)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return None, None


class Doubled(Found):
    @staticmethod
    def forward(t, w):
        return 2 * w


W, T = torch.ones(3, 4, 2), torch.zeros(3, 5, dtype=torch.int64)


def scripted(function):
    with warnings.catch_warnings(action="ignore"):
        return torch.jit.trace(function, (W[0], T[0]))


BEHIND = {
    "TorchScript interpreter": scripted(lambda w, t: F.embedding(t, w)),
    "in the TorchScript interpreter": scripted(lambda w, t: w.prod()),
    "failed in the TorchScript interpreter": scripted(lambda w, t: w.index_fill(0, t, 0.0)),
    "aten.embedding .* autograd.Function": lambda w, t: Found.apply(t, w),
    "aten.embedding .* called by this name": lambda w, t: torch.ops.aten.embedding(w, t),
}


@pytest.mark.parametrize("says", BEHIND)
def test_an_operation_that_mixes_users_behind_the_replacements_is_refused(says):
    harmless = scripted(lambda w, t: w.sin() + t.sum())
    with Bypass():
        safe(lambda given: F.embedding(given["t"], harmless(given["w"], given["t"]), 1).prod(), {"w": W, "t": T})
        safe(lambda given: Doubled.apply(given["t"], given["w"]).prod(), {"w": W, "t": T})  # whose rule torch makes
        with pytest.raises(RuntimeError, match=says):
            safe(lambda given: BEHIND[says](given["w"], given["t"]).sum(), {"w": W, "t": T})
