# Part of _engine.pyx: drafters and what verifies their drafts. Documented in _engine.pyi.

Draft = namedtuple("Draft", "tokens proposals", defaults=((),))
DraftOrder = namedtuple("DraftOrder", "seq_id last most temperature seed", defaults=(0.0, 0))
DrafterStatistics = namedtuple(
    "DrafterStatistics",
    "name n_begins n_draft_calls n_accept_calls n_drafts n_accepted_drafts n_tokens n_accepted_tokens accepted_at "
    "begin_ms draft_ms accept_ms")

speculation_types = tuple(text(native.speculation_types().data()[i]) for i in range(native.speculation_types().size()))


cdef vector[native.Proposal] proposal_vector(proposals) except *:
    cdef vector[native.Proposal] result
    cdef native.Proposal one
    cdef native.TokenProbability candidate
    for proposal in proposals:
        one.clear()
        for token, probability in proposal:
            candidate.token = token
            candidate.value = probability
            one.push_back(candidate)
        result.push_back(one)
    return result


cdef class SyntheticAcceptance:
    cdef shared_ptr[native.SyntheticAcceptance] ptr

    def __init__(self, rates, uint32_t seed):
        cdef vector[double] native_rates
        for rate in rates:
            if not 0.0 <= rate <= 1.0:
                raise InvalidArgument(f"an acceptance rate is {rate}, expected 0 to 1")
            native_rates.push_back(<double>rate)
        self.ptr = native.new_synthetic_acceptance(native_rates, seed)


cdef class Speculator:
    cdef shared_ptr[native.Speculator] ptr

    def __init__(self, Engine target not None, types, *, Engine draft=None, int32_t draft_n_max=3, int32_t draft_n_min=0,
                 float draft_p_min=0.0, bint draft_samples=False, ngram_simple=(12, 48), ngram_map_k=(12, 48, 1),
                 ngram_map_k4v=(12, 48, 1), ngram_mod=(24, 48, 64), lookup_static="", lookup_dynamic=""):
        cdef native.SpeculationParams params
        for name in types:
            params.types.push_back(<string>name.encode())
        params.chain.n_max = draft_n_max
        params.chain.n_min = draft_n_min
        params.chain.p_min = draft_p_min
        params.chain.samples = draft_samples
        params.simple.n, params.simple.m = ngram_simple
        params.map_k.n, params.map_k.m, params.map_k_min_hits = ngram_map_k
        params.map_k4v.n, params.map_k4v.m, params.map_k4v_min_hits = ngram_map_k4v
        params.mod.n_match, params.mod.n_min, params.mod.n_max = ngram_mod
        params.lookup_static = native_path(lookup_static)
        params.lookup_dynamic = native_path(lookup_dynamic)
        cdef shared_ptr[native.Engine] engine = target.engine()
        cdef shared_ptr[native.Engine] draft_engine
        if draft is not None:
            draft_engine = draft.engine()
        cdef shared_ptr[native.Speculator] created
        with nogil:
            created = native.new_speculator(engine, params, draft_engine)
        self.ptr = created

    cdef native.Speculator* speculator(self) except NULL:
        if not self.ptr:
            raise PyllamaError("the speculator is closed")
        return self.ptr.get()

    @property
    def names(self):
        return [name.decode() for name in self.speculator().names()]

    @property
    def longest(self):
        return self.speculator().longest()

    def begin(self, int32_t seq_id):
        cdef native.Speculator* speculator = self.speculator()
        with nogil:
            speculator.begin(seq_id)

    def follow(self, int32_t seq_id):
        cdef native.Speculator* speculator = self.speculator()
        with nogil:
            speculator.follow(seq_id)

    def draft(self, orders):
        cdef native.Speculator* speculator = self.speculator()
        cdef vector[native.DraftOrder] native_orders
        cdef native.DraftOrder order
        cdef vector[native.Draft] drafts
        cdef size_t i, j
        for seq_id, last, most, temperature, seed in orders:
            order.sequence = seq_id
            order.last = last
            order.most = most
            order.temperature = temperature
            order.seed = seed
            native_orders.push_back(order)
        cdef native.DraftOrderSpan view = native.DraftOrderSpan(native_orders.data(), native_orders.size())
        with nogil:
            drafts = speculator.draft(view)
        result = []
        for i in range(drafts.size()):
            proposals = [probability_list(drafts[i].proposals[j]) for j in range(drafts[i].proposals.size())]
            result.append(Draft(list(drafts[i].tokens), proposals))
        return result

    def accept(self, int32_t seq_id, int32_t n_verified, int32_t n_accepted):
        self.speculator().accept(seq_id, n_verified, n_accepted)

    def forget(self, int32_t seq_id):
        cdef native.Speculator* speculator = self.speculator()
        with nogil:
            speculator.forget(seq_id)

    def save(self):
        cdef native.Speculator* speculator = self.speculator()
        with nogil:
            speculator.save()

    def statistics(self):
        cdef vector[native.DrafterStatistics] all_of_them = self.speculator().statistics()
        cdef size_t i
        return [
            DrafterStatistics(
                all_of_them[i].name.decode(), all_of_them[i].n_begins, all_of_them[i].n_draft_calls,
                all_of_them[i].n_accept_calls, all_of_them[i].n_drafts, all_of_them[i].n_accepted_drafts,
                all_of_them[i].n_tokens, all_of_them[i].n_accepted_tokens, list(all_of_them[i].accepted_at),
                all_of_them[i].begin_ms, all_of_them[i].draft_ms, all_of_them[i].accept_ms)
            for i in range(all_of_them.size())
        ]

    def close(self):
        cdef shared_ptr[native.Speculator] last
        last.swap(self.ptr)
        with nogil:
            last.reset()
