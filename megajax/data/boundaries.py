"""The end of a document inside a sample: Megatron's --reset-position-ids, --reset-attention-mask and --eod-mask-loss."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Boundaries:
    """Each is off by default, as in Megatron: a sample is one text, whatever it was cut from.

    Attributes:
      end_of_document: id of the token that ends a document and still belongs to it.
      reset_positions: positions begin at 0 in every document.
      reset_attention: a token attends to its own document only.
      mask_loss: what follows an end of document is no label: the next document's first token cannot be known.
    """

    end_of_document: int
    reset_positions: bool = False
    reset_attention: bool = False
    mask_loss: bool = False

    def of(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """What a batch has beside its tokens int [b, s]; every array is [b, s].

        Returns:
          weights float32; positions int32, if they are reset; document int32, the number of the token's document within
          its sample, if attention is reset.
        """
        ends = tokens == self.end_of_document
        batch = {"weights": np.where(ends & self.mask_loss, 0, 1).astype(np.float32)}
        begins = np.zeros_like(ends)
        begins[:, 1:] = ends[:, :-1]
        if self.reset_positions:
            place = np.arange(tokens.shape[1], dtype=np.int32)
            batch["positions"] = place - np.maximum.accumulate(np.where(begins, place, 0), axis=1)
        if self.reset_attention:
            batch["document"] = np.cumsum(begins, axis=1, dtype=np.int32)
        return batch
