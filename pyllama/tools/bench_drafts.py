"""Generation with drafts for llama-bench: as many tokens as without, in fewer steps.

Texts begin with random tokens, of which drafters know nothing: what stands says little, unless `--spec-synth-len` or
`--spec-synth-rates` say it by chance. Drafts are verified whole.
"""

from collections.abc import Mapping
from typing import Any

from pyllama.options import Options
from pyllama.speculation import MOST_ROWS, SpeculationOptions, open_speculation, speculation_from_options

SEED = 1


def speculation_of(options: Options) -> SpeculationOptions | None:
    """None: nothing is drafted."""
    found = speculation_from_options(options, options.spec_draft_model)
    return found if found.is_on or found.infers_type else None


class DraftedGeneration:
    """One sequence of an engine that generates greedily. native: the module `pyllama._engine`."""

    def __init__(self, native: Any, engine: Any, model: Any, options: SpeculationOptions, arguments: Mapping[str, Any]):
        """arguments: of the engine. Raises what opening the drafters raises."""
        self._native, self._engine = native, engine
        self._speculation = open_speculation(options, engine, model.metadata, engine_arguments=arguments)
        self._n_vocab = model.n_vocab
        assert self._speculation is not None
        self._longest = min(self._speculation.longest, MOST_ROWS - 1, arguments["n_ubatch"] - 1)
        self.n_drafted = self.n_accepted = 0

    def generate(self, last: int, n_tokens: int) -> None:
        """`n_tokens` more tokens after `last`, which is computed first."""
        native, speculator = self._native, self._speculation.speculator
        sampler = native.Sampler(self._n_vocab, temperature=0.0, seed=SEED)
        rates = self._speculation.synthetic_rates
        synthetic = native.SyntheticAcceptance(rates, SEED) if rates else None
        if self._speculation.computes:
            speculator.follow(0)
        (output,) = self._engine.step([native.Work(0, [last], sampler)])
        last, n_made = output.token, 1
        speculator.begin(0)
        while n_made < n_tokens:
            tokens, proposals = [], []
            if (room := min(self._longest, n_tokens - n_made - 1)) > 0:
                ((tokens, proposals),) = speculator.draft([native.DraftOrder(0, last, room, 0.0, SEED)])
            work = native.Work(0, [last], sampler, draft=tokens, proposals=proposals, synthetic=synthetic)
            outputs = self._engine.step([work])
            last = outputs[-1].token
            n_made += len(outputs)
            if tokens:
                speculator.accept(0, len(tokens), len(outputs) - 1)
                self.n_drafted += len(tokens)
                self.n_accepted += len(outputs) - 1

    def close(self) -> None:
        self._speculation.close()
