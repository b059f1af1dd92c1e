"""ZeRO folders as DeepSpeed lays them out, and the weights they must give.

DeepSpeed needs processes and a compiler; its layout needs neither: flat fp32 groups, cut over ranks
(stages 1 and 2) or parameter by parameter (stage 3), both padded.
"""

from collections import OrderedDict

import torch

__all__ = ["BUFFERS", "FROZEN", "GROUPS", "SHARED", "expected", "write_zero"]

RANDOM = torch.Generator().manual_seed(3)


def _random(*shape):
    return torch.randn(*shape, generator=RANDOM)


GROUPS = [
    {"embed.weight": _random(11, 5), "layer.weight": _random(4, 7), "layer.bias": _random(4)},
    {"norm.weight": _random(3), "scale": _random(()), "head": _random(2, 3, 4)},
]
BUFFERS = {"mean": _random(4).half(), "steps": torch.tensor(9)}
FROZEN = {"frozen.weight": _random(3, 3).half(), "frozen.bias": _random(5).half()}
SHARED = {"tied.weight": "embed.weight"}


def expected():
    """What the folder must open as."""
    weights = {name: tensor for group in GROUPS for name, tensor in group.items()}
    buffers = {name: t.float() if t.is_floating_point() else t for name, t in BUFFERS.items()}
    return {**buffers, **FROZEN, **weights, **{n: weights[kept] for n, kept in SHARED.items()}}


def _padded(flat, unit):
    return torch.cat([flat, torch.full((-flat.numel() % unit,), 777.0)])


def _partitions_of_groups(world, align):
    """Stages 1 and 2: [rank][group]."""
    flat = [
        _padded(torch.cat([_padded(t.reshape(-1), align) for t in g.values()]), 2 * world)
        for g in GROUPS
    ]
    return [[group.chunk(world)[rank].clone() for group in flat] for rank in range(world)]


def _partition(tensor, world, rank):
    """Stage 3: the part of a parameter that a rank holds."""
    return _padded(tensor.reshape(-1), world).chunk(world)[rank].clone()


def _partitions_of_parameters(world, sub_group):
    """Stage 3: [rank][sub-group], cut wherever a sub-group is full."""
    ranks = []
    for rank in range(world):
        parts = [_partition(t, world, rank) for group in GROUPS for t in group.values()]
        ranks.append(list(torch.cat(parts).split(sub_group)))
    return [[part.clone() for part in parts] for parts in ranks]


def write_zero(
    directory,
    stage,
    world,
    *,
    bf16=False,
    align=1,
    paddings=None,
    sub_group=10**9,
    latest=True,
    **changes,
):
    """Write a checkpoint folder; returns the folder with the files in it.

    With `align`, each parameter of stages 1 and 2 begins at a multiple of it, as since 0.19.
    """
    folder = directory / "global_step5"
    folder.mkdir(parents=True)
    if latest:
        (directory / "latest").write_text("global_step5")
        (directory / "zero_to_fp32.py").write_text("raise SystemExit")
    is_3 = stage == 3
    flat = (
        _partitions_of_parameters(world, sub_group) if is_3 else _partitions_of_groups(world, align)
    )
    if align > 1:
        paddings = [[-t.numel() % align for t in group.values()] for group in GROUPS]
    for rank in range(world):
        name = f"{'bf16_' if bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        key = "fp32_flat_groups" if is_3 else "single_partition_of_fp32_groups"
        moments = {"state": {0: {"exp_avg": torch.zeros_like(flat[rank][0])}}}
        state = {
            "zero_stage": stage,
            "partition_count": world if is_3 else [world] * len(GROUPS),
            "base_optimizer_state": moments,
            key: flat[rank],
            **({} if paddings is None else {"param_alignment_paddings": paddings}),
        }
        torch.save({"optimizer_state_dict": state, "ds_version": "0.16.2"}, folder / name)
    shapes = [OrderedDict((n, t.shape) for n, t in group.items()) for group in GROUPS]
    for rank in range(world if is_3 else 1):
        fragments = {n: _partition(t, world, rank) for n, t in FROZEN.items()} if is_3 else FROZEN
        module = {n: t.half() for group in GROUPS for n, t in group.items()} | BUFFERS
        model = {
            "module": module,
            "buffer_names": list(BUFFERS),
            "param_shapes": shapes,
            "frozen_param_shapes": {n: t.shape for n, t in FROZEN.items()},
            "frozen_param_fragments": {n: t.clone().half() for n, t in fragments.items()},
            "shared_params": SHARED,
            "ds_version": "0.16.2",
            "global_steps": 5,
            **changes,
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00" if is_3 else "mp_rank_00"
        torch.save(model, folder / f"{name}_model_states.pt")
    return folder
