"""What mechanisms share that can decode: a step is a causal scan from the state of the last."""

from __future__ import annotations

from torch import Tensor

from fastattn.nn.multihead import MultiHead
from fastattn.ops import LinearState


class Recurrent(MultiHead):
    """A mechanism whose past fits in a state of fixed size; abstract."""

    def _scan(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None
    ) -> tuple[Tensor, LinearState]:
        """Causal attention over heads ``(b, h, n, d)`` that continues from a state."""
        raise NotImplementedError

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, state: LinearState | None = None
    ) -> tuple[Tensor, LinearState]:
        """Decode: attend from new tokens to all tokens so far, in O(1) per token.

        Args:
            query, key, value: The new tokens, one or more, shaped as in ``forward``.
            state: What the previous call returned; None starts a sequence.

        Returns:
            The output, shaped as ``forward``'s, and the state to give to the next call. A
            sequence in steps of any length gives the same as one causal ``forward``.

        Raises:
            ValueError: The module is not causal, or the state is another batch's.
        """
        if not self.causal:
            raise ValueError(
                f"{type(self).__name__}.step needs causal=True in the constructor: without it a "
                "token would have to see the tokens that come after it"
            )
        batched = self._check_inputs(query, key, value)
        q, k, v = self._project(*self._batch_first((query, key, value), batched))
        if state is None and self._extra_keys:
            nothing = q.new_zeros(q.shape[0], q.shape[1], self._extra_keys, q.shape[3])
            _, state = self._scan(nothing, *self._extras(k, v), None)
        out, state = self._scan(q, k, v, state)
        return self.out_proj(self._merge(out, batched)), state
