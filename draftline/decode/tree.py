"""How drafted tokens hang together: a tree behind an anchor, of which a chain is the plainest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes of which 0 is the anchor, and every parent stands before its children.

    `parents` and `depth [rows or 1, nodes]`: the anchor is its own parent, at depth 0. `rank` of the
    same shape: how many siblings stand before a node. `ancestors [rows or 1, nodes, nodes]`: whether
    the second lies on the path from the anchor to the first, both included. No node has more than
    `branching` children, and none lies deeper than `height`.
    """

    parents: Tensor
    depth: Tensor
    rank: Tensor
    ancestors: Tensor
    branching: int
    height: int

    @classmethod
    def of(cls, parents: Tensor, *, branching: int, height: int) -> Tree:
        """The tree of int64 `parents [rows or 1, nodes]`; decides nothing on the host."""
        nodes = parents.shape[1]
        node = torch.arange(nodes, device=parents.device)
        ancestors = (node[:, None] == node).expand(len(parents), -1, -1)
        above = parents
        for _ in range(height):
            ancestors = ancestors | (node == above[:, :, None])
            above = parents.gather(1, above)
        siblings = (parents[:, :, None] == parents[:, None, :]) & (node > 0)
        rank = (siblings & (node < node[:, None])).sum(2)
        return cls(parents, ancestors.sum(2) - 1, rank, ancestors, branching, height)

    @classmethod
    def chain(cls, nodes: int, device: torch.device) -> Tree:
        """Every node but the last has one child."""
        parents = torch.arange(-1, nodes - 1, device=device).clamp_min(0)[None]
        return cls.of(parents, branching=1, height=nodes - 1)

    @property
    def nodes(self) -> int:
        return self.parents.shape[1]

    @property
    def is_chain(self) -> bool:
        """Whether node n lies at depth n: with one child per node it cannot be otherwise."""
        return self.branching <= 1

    def positions(self, slots: Tensor) -> Tensor:
        """Positions `[rows, slots]` of nodes that lie in the cache at `slots [rows, slots]`, the
        anchor's first and at its own position; slots behind the last node are like nodes of a chain."""
        if self.is_chain:
            return slots
        depth = self.depth.expand(len(slots), -1)
        return torch.cat([slots[:, :1] + depth, slots[:, self.nodes :]], dim=1)

    def visible(self, slots: Tensor, keys: Tensor) -> Tensor:
        """Which of the cache's slots `keys [keys]` the nodes at `slots [rows, slots]` see, bool
        `[rows, 1, slots, keys]`: what lies before the anchor, their ancestors and themselves."""
        if self.is_chain:
            return keys[None, None, None] <= slots[:, None, :, None]
        spare = slots.shape[1] - self.nodes
        table = F.pad(self.ancestors, (0, spare, 0, spare)).expand(len(slots), -1, -1)
        node = keys - slots[:, :1]
        inside = (node >= 0) & (node < slots.shape[1])
        column = node.clamp(0, slots.shape[1] - 1)[:, None].expand(-1, slots.shape[1], -1)
        return ((node < 0)[:, None] | (table.gather(2, column) & inside[:, None]))[:, None]

    def accepted(self, taken: Tensor) -> tuple[Tensor, Tensor]:
        """The deepest node `[rows]` that is `taken [rows, nodes - 1]` with all its ancestors, and its
        depth; the anchor always is."""
        whole = F.pad(taken, (1, 0), value=True)
        reached = (whole[:, None] | ~self.ancestors).all(2)
        depth, node = (self.depth * reached).max(1)
        return node, depth

    def eldest(self, stands: Tensor) -> Tensor:
        """Of `stands [rows, nodes - 1]` what has no elder sibling in it."""
        if self.is_chain:
            return stands
        parents, rank = self.parents[:, 1:], self.rank[:, 1:]
        elder = (parents[:, :, None] == parents[:, None]) & (rank[:, None] < rank[:, :, None])
        return stands & ~(elder & stands[:, None]).any(2)

    def path(self, last: Tensor) -> Tensor:
        """Nodes `[rows, height + 1]` from the anchor to `last [rows]`; what follows it is any."""
        step = torch.arange(self.height + 1, device=last.device)
        if self.is_chain:
            return step.expand(len(last), -1)
        row = torch.arange(len(last), device=last.device) % len(self.parents)
        on = self.ancestors[row, last][:, None] & (self.depth[row][:, None] == step[:, None])
        return on.int().argmax(2)

    def along(self, path: Tensor, values: Tensor) -> Tensor:
        """Of `values [rows, nodes, ...]` those of a `path`: of a chain, all."""
        if self.is_chain:
            return values
        return values[torch.arange(len(path), device=path.device)[:, None], path]

    def children(self, nodes: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Whether each of `nodes [rows, n]` has a child of `rank`, and which node less one it is."""
        child = (self.parents[:, None, 1:] == nodes[:, :, None]) & (self.rank[:, None, 1:] == rank)
        return child.any(2), child.int().argmax(2)
