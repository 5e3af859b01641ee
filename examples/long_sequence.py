"""Train a small language model on a sequence that is spread over processes, and its parameters with FSDP.

    pip install -c constraints.txt -e '.[transformers]' && torchrun --nproc-per-node 2 examples/long_sequence.py

Each process has a part of the sequence and a part of the parameters; the model learns the sequence by heart. It takes
half a minute on two CPU cores; the lines are meant for GPUs as well, but nobody has run them there yet.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from continuous_attention import parallelize_context, shard_batch, switch_to_continuous

STEPS, LENGTH, VOCABULARY = 30, 1024, 100

dist.init_process_group()
torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
# Two dims: batches over "dp" (one here), sequences over "cp". Parameters are sharded over all of them.
mesh = init_device_mesh(device, (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
with torch.device(device):
    model = LlamaForCausalLM(config)
switch_to_continuous(model, boundary="learned")
parallelize_context(model, group=mesh["cp"], placement="zigzag")
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

tokens = torch.randint(VOCABULARY, (1, LENGTH), device=device)  # the whole batch, the same on every rank
part = shard_batch({"input_ids": tokens, "labels": tokens}, group=mesh["cp"], placement="zigzag")
for step in range(STEPS):
    loss = model(**part, use_cache=False).loss
    loss.backward()  # FSDP averages over the ranks, which gives the gradient of the whole sequence's loss
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss)
    if dist.get_rank() == 0 and step % 5 == 4:
        nodes = part["input_ids"].shape[1]
        print(f"step {step + 1}: loss {loss.item() / dist.get_world_size():.3f}, {nodes} tokens on each rank")
dist.destroy_process_group()
