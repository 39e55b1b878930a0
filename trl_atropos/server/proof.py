"""Computes what a publish is proven by: fingerprints of the memory behind each of the trainer's
parameters, and the values of a model that no publish changes.
"""

import torch
from torch import Tensor, nn

from trl_atropos.protocol import ParameterSpec
from trl_atropos.server import layout
from trl_atropos.server.layout import Piece
from trl_atropos.tensors.fingerprint import Fingerprints, PlacedPart, joined


def fingerprints_of(pieces: list[list[Piece]], specs: list[ParameterSpec]) -> Fingerprints:
    """Returns one fingerprint for each piece, parameter by parameter."""
    parts = []
    for spec, parameter_pieces in zip(specs, pieces, strict=True):
        for values, part in parameter_pieces:
            number = len(parts)
            placed = PlacedPart(values, part, spec.shape, number)
            parts.append(placed)
    return Fingerprints(parts, len(parts))


class Constants:
    """Values that a config determines and no publish changes: numbers of a model's modules, and its
    rotary tables."""

    def __init__(self, model: nn.Module, device: torch.device):
        self.device = device
        self._addresses: list[int] = []  # of the tables that `_table_fingerprints` is for
        self._table_fingerprints: Fingerprints | None = None
        self.values = self._values_of(model)

    def changed(self, model: nn.Module) -> list[str]:
        """Returns the names of those that are not what they were at first."""
        values_now = self._values_of(model)
        names = []
        for name, value in self.values.items():
            value_now = values_now.get(name)
            if value_now != value:
                names.append(name)
        return names

    def _values_of(self, model: nn.Module) -> dict[str, float]:
        """Returns the numbers, and the fingerprints of the tables."""
        numbers = layout.numbers_of(model)
        tables = layout.tables_of(model, self.device)
        fingerprints = self._fingerprints_of(tables)
        return numbers | fingerprints

    def _fingerprints_of(self, tables: dict[str, Tensor]) -> dict[str, int]:
        if not tables:
            return {}
        addresses = []
        for table in tables.values():
            address = table.data_ptr()
            addresses.append(address)
        if addresses != self._addresses:
            parts = []
            for number, table in enumerate(tables.values()):
                whole = PlacedPart.whole(table, number)
                parts.append(whole)
            self._addresses = addresses
            self._table_fingerprints = Fingerprints(parts, len(parts))
        sums = self._table_fingerprints.compute()
        fingerprints = joined(sums)
        by_name = zip(tables, fingerprints, strict=True)
        return dict(by_name)
