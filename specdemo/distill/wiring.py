"""A draft's first weights: the target's outer layers, and a circuit that copies.

Text repeats itself: where the last two tokens have stood together before, what followed them then is often what
follows now. A transformer of two layers can express this (an "induction" circuit: Olsson et al. 2022, "In-context
Learning and Induction Heads"), but finds it by gradient descent only after far more text than a draft is given. So
it is wired by hand and training only tunes it:

- layer 0, one key-value group: its query heads attend exactly 0, 1 and 2 tokens back, by the phases of their rotary
  frequencies alone, and write a fingerprint of the token found there into three subspaces that embeddings hardly use;
- last layer, one key-value group: the query is the fingerprint of this token and of the one before, the key at each
  position that of the one before it and the one before that, so it attends to where the same two tokens last ended;
  what it finds there, the fingerprint of the token itself, is written out as that token's embedding.

Everything stays an ordinary Llama layer: only numbers are chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .student import Layer, Student, TargetParts, rotary_tables

FOUND = 3  # query heads that look 0, 1 and 2 tokens back
POSITION_SHARPNESS = 10.0
MATCH_SHARPNESS = 20.0
WHITENED = 0.5  # share of the embeddings' axes that fingerprints use, the larger ones
RELIABLE = 1e-5  # an axis with less of the largest variance than this is noise
WRITTEN = 2.0  # size of a fingerprint's numbers in the residual stream
COPY_STRENGTH = 4.0
START_TEMPERATURE = 0.3  # on the final norm: the fresh draft knows little and should not be sure


@dataclass(frozen=True, slots=True)
class Circuit:
    """The wired numbers, to be held while all around them is still noise.

    rows: of both layers' qkv. heads: columns of the first layer's output. taken: [hidden, D], the rooms.
    """

    rows: Tensor
    heads: slice
    first_qkv: Tensor
    first_output: Tensor
    last_qkv: Tensor
    taken: Tensor
    frequency: Tensor
    size: float

    def to(self, device: torch.device) -> Circuit:
        """The same circuit, to hold a draft on another device."""
        names = ("rows", "first_qkv", "first_output", "last_qkv", "taken")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    @torch.no_grad()
    def hold(self, student: Student) -> None:
        """Undo what a training step did to the circuit, and clear the rooms of what others would write there."""
        first, last = student.layers[0], student.layers[-1]
        assert isinstance(first, Layer)
        assert isinstance(last, Layer)
        for written in (first.output, first.down):
            written.sub_(self.taken @ (self.taken.T @ written))
        first.qkv[self.rows] = self.first_qkv
        first.output[:, self.heads] = self.first_output
        # the states grow as the rest learns, and the norm before the last layer would shrink the fingerprints with them
        last.qkv[self.rows] = self.last_qkv * (typical_size(student, self.frequency) / self.size)

    @torch.no_grad()
    def hold_offsets(self, student: Student) -> None:
        """The same for what offsets of embeddings would write into the rooms."""
        student.offsets.sub_((student.offsets @ self.taken) @ self.taken.T)


def fold_norms(layer: Layer) -> None:
    """Move the norms' gains into the projections behind them, so that all weights are of a like size for AdamW."""
    layer.qkv.mul_(layer.attention_norm)
    layer.attention_norm.fill_(1.0)
    layer.gate_up.mul_(layer.mlp_norm)
    layer.mlp_norm.fill_(1.0)


@torch.no_grad()
def wire(
    student: Student, parts: TargetParts, frequency: Tensor, calm: float = 0.02, first_calm: float = 0.3
) -> Circuit | None:
    """Fold the norms and wire the circuit into a fresh draft; None where its shape has no room for it.

    frequency: float [vocab], how often each id occurs. calm: factor on what the last layer adds, since it meets
    states here that it never saw in the target.
    """
    first, last, shape = student.layers[0], student.layers[-1], student.shape
    assert isinstance(first, Layer)
    assert isinstance(last, Layer)
    for layer in student.layers:
        assert isinstance(layer, Layer)
        fold_norms(layer)
    first.output.mul_(first_calm)
    first.down.mul_(first_calm)
    last.output.mul_(calm)
    last.down.mul_(calm)
    student.norm.mul_(START_TEMPERATURE)
    dim, groups = shape.head_dim, shape.heads // shape.kv_heads
    if shape.layers < 2 or groups < FOUND or shape.kv_heads < 2 or shape.hidden < 5 * dim:
        return None
    seen = torch.nonzero(frequency >= 1).squeeze(1)
    raw = parts.embeddings[seen].double()
    weight = frequency[seen].double().sqrt()
    weight /= weight.sum()
    # where the embeddings vary least there is room to write
    _, axes = torch.linalg.eigh((raw * weight[:, None]).T @ raw)
    rooms = [axes[:, i * dim : (i + 1) * dim] for i in range(FOUND)]  # each [hidden, dim]
    taken = axes[:, : FOUND * dim]
    # fingerprints: chance directions through the embeddings, whitened so that no two tokens are near each other
    unit = raw / raw.pow(2).mean(1, keepdim=True).add(shape.norm_eps).sqrt()  # as the first norm makes them
    mean = (unit * weight[:, None]).sum(0)
    centred = unit - mean
    variance, axes = torch.linalg.eigh((centred * weight[:, None]).T @ centred)
    wide = max(dim, round(shape.hidden * WHITENED))
    if int((variance > RELIABLE * variance[-1]).sum()) < wide:
        return None  # too few tokens to tell directions apart
    generator = torch.Generator().manual_seed(0)
    chance = torch.linalg.qr(torch.randn(wide, dim, generator=generator, dtype=torch.float64)).Q.T
    whiten = chance @ (axes[:, -wide:] / variance[-wide:].sqrt()).T  # [dim, hidden]
    root = weight.sqrt()[:, None]
    one = torch.linalg.lstsq(unit * root, root).solution.squeeze(1)  # one @ unit is about 1 for every token
    fingerprint = whiten - torch.outer(whiten @ mean, one)
    # and back: least squares from a fingerprint to the state whose logits single its token out
    prints = unit @ fingerprint.T
    known = torch.isin(seen, student.vocab_ids)
    scored = parts.embeddings[seen[known]].double() * student.norm.double()
    gram = (scored * weight[known][:, None]).T @ scored
    gram += 1e-3 * gram.diagonal().mean() * torch.eye(shape.hidden, dtype=torch.float64)
    spell = torch.linalg.solve(gram, (scored * weight[known][:, None]).T @ prints[known])  # [hidden, dim]
    spell /= (prints[known] @ spell.T).pow(2).mean().sqrt()

    q, k, v = (
        slice(shape.heads * dim),
        *(
            slice((shape.heads + i * shape.kv_heads) * dim, (shape.heads + (i + 1) * shape.kv_heads) * dim)
            for i in (0, 1)
        ),
    )
    group = shape.kv_heads - 1
    kv_rows = slice(group * dim, (group + 1) * dim)
    half = dim // 2
    theta = shape.rope_theta ** (-torch.arange(0, half, dtype=torch.float64) / half)

    # layer 0: keep the three rooms free of everything else, then look 0, 1, 2 back
    keep_out = torch.eye(shape.hidden, dtype=torch.float64) - taken @ taken.T
    first.output.copy_(keep_out.float() @ first.output)
    first.down.copy_(keep_out.float() @ first.down)
    for reading in (first.gate_up, last.gate_up, last.qkv):
        reading.copy_(reading @ keep_out.float())
    amplitude = torch.zeros(half, dtype=torch.float64)
    fast = min(6, half)
    amplitude[:fast] = POSITION_SHARPNESS * torch.tensor([1.0, 1.0, 0.7, 0.7, 0.7, 0.7][:fast], dtype=torch.float64)
    scale = (dim / 64) ** 0.25
    first.qkv[k][kv_rows] = torch.outer(scale * torch.cat([amplitude, torch.zeros(half)]), one).float()
    first.qkv[v][kv_rows] = fingerprint.float()
    for back in range(groups):
        head = group * groups + back
        rows = slice(head * dim, (head + 1) * dim)
        if back < FOUND:
            phase = torch.cat([amplitude * torch.cos(theta * back), -amplitude * torch.sin(theta * back)])
            first.qkv[q][rows] = torch.outer(scale * phase, one).float()
            first.output[:, rows] = (WRITTEN * rooms[back]).float()

    # last layer: match this token and the one before against the ones before each position
    mix = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64)).Q
    slow = int((theta > 0.01).sum())  # the first pair that hardly turns within a few hundred tokens
    slow = min(slow, half // 2)
    columns = torch.cat([torch.arange(slow, half), torch.arange(slow + half, dim)])
    single = (3 * len(columns)) // 5
    read = torch.zeros(dim, shape.hidden, dtype=torch.float64)
    now, then = read.clone(), read.clone()
    now[columns[:single]] = mix[:single] @ rooms[0].T
    now[columns[single:]] = mix[: len(columns) - single] @ rooms[1].T
    then[columns[:single]] = mix[:single] @ rooms[1].T
    then[columns[single:]] = mix[: len(columns) - single] @ rooms[2].T
    size = typical_size(student, frequency)
    gain = math.sqrt(MATCH_SHARPNESS * math.sqrt(dim / 64)) * size / WRITTEN
    last.qkv[k][kv_rows] = (gain * then).float()
    last.qkv[v][kv_rows] = (size / WRITTEN * rooms[0].T).float()
    for i in range(groups):
        head = group * groups + i
        rows = slice(head * dim, (head + 1) * dim)
        last.qkv[q][rows] = (gain * now).float()
        last.output[:, rows] = (COPY_STRENGTH / groups * spell).float()
    heads = slice(group * groups * dim, (group + 1) * groups * dim)
    mine = torch.cat(
        [torch.arange(len(first.qkv))[part][rows] for part, rows in ((q, heads), (k, kv_rows), (v, kv_rows))]
    )
    return Circuit(
        mine, heads, first.qkv[mine], first.output[:, heads].clone(), last.qkv[mine], taken.float(), frequency, size
    )


@torch.no_grad()
def typical_size(student: Student, frequency: Tensor) -> float:
    """Root mean square of the residual stream before the last layer, over tokens drawn by frequency."""
    generator = torch.Generator().manual_seed(1)
    ids = (
        torch.multinomial(frequency.float(), 256, replacement=True, generator=generator)
        .view(8, 32)
        .to(student.norm.device)
    )
    x = student.embed(ids)
    cos, sin = rotary_tables(32, student.shape.head_dim, student.shape.rope_theta, x.device)
    for layer in list(student.layers)[:-1]:
        assert isinstance(layer, Layer)
        x = layer.think(layer.attend(x, cos, sin))
    return float(x.pow(2).mean(-1).sqrt().median())
