import torch
from torch.distributed.device_mesh import DeviceMesh

# llama3-8b on h100_x1: ranks of the cluster at each place of the mesh.
ranks = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7]).reshape(4, 2)
mesh = DeviceMesh(torch.accelerator.current_accelerator().type, ranks, mesh_dim_names=("pp", "dp"))
# Modules of each stage, and the ranks that hold it.
stages = [
    ([0, 4], ['model.embed_tokens', 'model.layers.0', 'model.layers.1', 'model.layers.2', 'model.layers.3', 'model.layers.4', 'model.layers.5', 'model.layers.6', 'model.layers.7']),
    ([1, 5], ['model.layers.8', 'model.layers.9', 'model.layers.10', 'model.layers.11', 'model.layers.12', 'model.layers.13', 'model.layers.14', 'model.layers.15']),
    ([2, 6], ['model.layers.16', 'model.layers.17', 'model.layers.18', 'model.layers.19', 'model.layers.20', 'model.layers.21', 'model.layers.22', 'model.layers.23']),
    ([3, 7], ['model.layers.24', 'model.layers.25', 'model.layers.26', 'model.layers.27', 'model.layers.28', 'model.layers.29', 'model.layers.30', 'model.layers.31', 'model.norm', 'lm_head']),
]
