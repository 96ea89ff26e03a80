# Part of _engine.pyx: samplers and what they are made with. Documented in _engine.pyi.

cdef dict _stages = {
    "penalties": <int>SamplerStage.penalties, "dry": <int>SamplerStage.dry,
    "top_n_sigma": <int>SamplerStage.top_n_sigma, "top_k": <int>SamplerStage.top_k, "typ_p": <int>SamplerStage.typ_p,
    "top_p": <int>SamplerStage.top_p, "min_p": <int>SamplerStage.min_p, "xtc": <int>SamplerStage.xtc,
    "temperature": <int>SamplerStage.temperature, "infill": <int>SamplerStage.infill,
    "adaptive_p": <int>SamplerStage.adaptive_p,
}


cdef object probability_list(const vector[native.TokenProbability]& entries):
    return [(entries[i].token, entries[i].value) for i in range(entries.size())]


cdef class DryBreakers:
    cdef shared_ptr[const native.DryBreakers] ptr

    def __init__(self, breakers):
        cdef vector[native.DryBreaker] entries
        cdef native.DryBreaker entry
        for head, tail in breakers:
            entry.head = head
            entry.tail = token_vector(tail)
            entries.push_back(entry)
        self.ptr = native.new_dry_breakers(entries)


cdef class InfillVocabulary:
    cdef shared_ptr[const native.InfillVocabulary] ptr

    def __init__(self, texts, end_tokens, int32_t end):
        cdef vector[string] native_texts = texts
        self.ptr = native.new_infill_vocabulary(native_texts, token_vector(end_tokens), end)

    def __len__(self):
        return self.ptr.get().size()


cdef class Sampler:
    cdef shared_ptr[native.Sampler] ptr

    def __init__(self, int32_t n_vocab, *, seed=0xFFFFFFFF, float temperature=0.8, int32_t top_k=40, float top_p=0.95,
                 float min_p=0.05, int32_t min_keep=0, int32_t repeat_last_n=64, float repeat_penalty=1.0,
                 float presence_penalty=0.0, float frequency_penalty=0.0, float dynatemp_range=0.0,
                 float dynatemp_exponent=1.0, float top_n_sigma=-1.0, float typical_p=1.0, float xtc_probability=0.0,
                 float xtc_threshold=0.1, float dry_multiplier=0.0, float dry_base=1.75, int32_t dry_allowed_length=2,
                 int32_t dry_penalty_last_n=64, DryBreakers dry_breakers=None,
                 InfillVocabulary infill_vocabulary=None, int32_t mirostat=0, float mirostat_tau=5.0,
                 float mirostat_eta=0.1, float adaptive_target=-1.0, float adaptive_decay=0.9,
                 logit_bias=(),
                 samplers=("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc",
                           "temperature")):
        cdef native.SamplerParams params
        cdef native.TokenBias bias
        params.seed = seed & 0xFFFFFFFF
        params.temperature = temperature
        params.top_k = top_k
        params.top_p = top_p
        params.min_p = min_p
        params.min_keep = min_keep
        params.repeat_last_n = repeat_last_n
        params.repeat_penalty = repeat_penalty
        params.presence_penalty = presence_penalty
        params.frequency_penalty = frequency_penalty
        params.dynatemp_range = dynatemp_range
        params.dynatemp_exponent = dynatemp_exponent
        params.top_n_sigma = top_n_sigma
        params.typical_p = typical_p
        params.xtc_probability = xtc_probability
        params.xtc_threshold = xtc_threshold
        params.dry.multiplier = dry_multiplier
        params.dry.base = dry_base
        params.dry.allowed_length = dry_allowed_length
        params.dry.last_n = dry_penalty_last_n
        if dry_breakers is not None:
            params.dry_breakers = dry_breakers.ptr
        if infill_vocabulary is not None:
            params.infill_vocabulary = infill_vocabulary.ptr
        params.mirostat = mirostat
        params.mirostat_tau = mirostat_tau
        params.mirostat_eta = mirostat_eta
        params.adaptive_target = adaptive_target
        params.adaptive_decay = adaptive_decay
        for token, value in logit_bias:
            if 0 <= token < n_vocab:
                bias.token = token
                bias.bias = value
                params.logit_bias.push_back(bias)
        for name in samplers:
            if name not in _stages:
                raise InvalidArgument(f"sampler '{name}' is not one of {', '.join(_stages)}")
            params.stages.push_back(<SamplerStage><int>_stages[name])
        self.ptr = native.new_sampler(n_vocab, params)

    @property
    def seed(self):
        return self.ptr.get().seed()

    def accept(self, tokens):
        cdef vector[int32_t] native_tokens = token_vector(tokens)
        self.ptr.get().accept(TokenSpan(native_tokens.data(), native_tokens.size()))

    def set_mask(self, mask):
        if mask is None:
            self.ptr.get().set_mask(MaskSpan())
            return
        cdef const uint32_t[::1] words = np.ascontiguousarray(mask, dtype=np.uint32)
        if words.shape[0] == 0:
            raise InvalidArgument("a mask of 0 words; expected one bit per token")
        self.ptr.get().set_mask(MaskSpan(&words[0], <size_t>words.shape[0]))

    def sample(self, logits):
        cdef const float[::1] row = np.ascontiguousarray(logits, dtype=np.float32)
        cdef int32_t token
        if row.shape[0] != self.ptr.get().n_vocab():
            raise InvalidArgument(f"{row.shape[0]} logits for a vocabulary of {self.ptr.get().n_vocab()}")
        cdef FloatSpan view = FloatSpan(&row[0], <size_t>row.shape[0])
        with nogil:
            token = self.ptr.get().sample(view)
        return token

    def candidates(self):
        return probability_list(self.ptr.get().candidates())

    def reset(self):
        self.ptr.get().reset()

    def clone(self):
        cdef Sampler copy = Sampler.__new__(Sampler)
        copy.ptr = native.copy_sampler(deref(self.ptr))
        return copy
