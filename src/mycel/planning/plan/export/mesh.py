"""The mesh as a few lines of Python, with its ranks as the plan has them."""

from __future__ import annotations

from mycel.planning.plan.record import PlanRecord

__all__ = ["mesh"]


def mesh(plan: PlanRecord) -> dict[str, str]:
    """A ``DeviceMesh`` of torch, pipeline outermost, and the modules of each stage.

    Args:
        plan: a right one.
    """
    degrees = plan.job.mesh
    axes = [(name, getattr(degrees, name)) for name in ("pp", "dp", "cp", "tp")]
    shown = [(name, length) for name, length in axes if length > 1] or [("dp", 1)]
    names = ", ".join(f'"{name}"' for name, _ in shown) + ("," if len(shown) == 1 else "")
    sizes = ", ".join(str(length) for _, length in shown)
    ranks = ", ".join(map(str, plan.ranks))
    shares = ", ".join(map(str, plan.job.shares))
    lines = [
        "import torch",
        "from torch.distributed.device_mesh import DeviceMesh",
        "",
        f"# {plan.model.shape.name} on {plan.cluster.name}: ranks of the cluster at each place of the mesh.",
        f"ranks = torch.tensor([{ranks}]).reshape({sizes})",
        f"mesh = DeviceMesh(torch.accelerator.current_accelerator().type, ranks, mesh_dim_names=({names}))",
        *([f"# Micro-batches of {plan.job.micro_batch} of each replica: {shares}."] if plan.job.shares else []),
        *([f"# Layers are done in {plan.job.coshard} pieces, one after the other."] if plan.job.coshard > 1 else []),
        "# Modules of each stage, and the ranks that hold it.",
        "stages = [",
        *(
            f"    ({list(ranks)}, {list(modules)}),"
            for ranks, modules in zip(plan.stage_ranks, plan.cut, strict=True)
        ),
        "]",
    ]
    return {"mesh.py": "\n".join(lines) + "\n"}
