# Mirror of the engine's headers: declarations only. Everything is nogil; everything that can throw names the translator.

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool
from libcpp.map cimport map
from libcpp.memory cimport shared_ptr
from libcpp.optional cimport optional
from libcpp.string cimport string
from libcpp.vector cimport vector

cdef extern from "translate_error.h" namespace "v100" nogil:
    void translate_error()

cdef extern from "<string_view>" namespace "std" nogil:
    cdef cppclass string_view:
        const char* data()
        size_t size()

cdef extern from "<cstddef>" namespace "std" nogil:
    cdef cppclass byte:
        pass

cdef extern from "<span>" namespace "std" nogil:
    cdef cppclass span[T]:
        span()
        span(T* data, size_t size)
        T* data()
        size_t size()

ctypedef span[const int32_t] TokenSpan
ctypedef span[const uint8_t] FlagSpan
ctypedef span[const float] FloatSpan
ctypedef span[const uint32_t] MaskSpan
ctypedef span[const byte] ByteSpan

cdef extern from "quants/types.h" namespace "v100" nogil:
    cdef enum class QuantType(int32_t):
        pass
    cdef cppclass QuantTraits:
        QuantType type
        string_view name
        int32_t block_values
        int32_t block_bytes
        bool is_quantized
    const int32_t kQuantTypeCount
    const QuantTraits* find_traits(int32_t type_id)
    const QuantTraits& traits(QuantType type) except +translate_error
    optional[QuantType] quant_type_from_name(string_view name)

cdef extern from "quants/decode.h" namespace "v100" nogil:
    void decode(QuantType type, const byte* blocks, float* values, int64_t n_values) except +translate_error
    int64_t count_non_finite(QuantType type, const byte* blocks, int64_t n_values) except +translate_error

cdef extern from "quants/encode.h" namespace "v100" nogil:
    bool encoding_needs_importance(QuantType type)

cdef extern from "native_bridge.h" namespace "v100" nogil:
    void convert_rows(QuantType source_type, const byte* source, QuantType target_type, int64_t n_rows, int64_t n_columns,
                      const float* importance, byte* target, int32_t n_threads) except +translate_error

cdef extern from "gguf/container.h" namespace "v100" nogil:
    string_view value_type_name(GgufValueType type)

cdef extern from "gguf/gguf.h" namespace "v100" nogil:
    cdef enum class GgufValueType(int32_t):
        U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64
    cdef cppclass GgufArray:
        GgufValueType element_type
        uint64_t count
        ByteSpan bytes
        vector[string_view] strings
    cdef cppclass GgufValue:
        pass
    cdef cppclass GgufKeyValue:
        string_view key
        GgufValueType type
        GgufValue value
    cdef cppclass GgufTensor:
        string_view name
        QuantType type
        int32_t n_dims
        int64_t ne[4]
        int32_t shard
        uint64_t file_offset
        uint64_t n_bytes
    cdef cppclass GgufFile:
        @staticmethod
        shared_ptr[const GgufFile] open(const string& path, bool metadata_only, bool single_file) except +translate_error
        int32_t version() const
        uint64_t alignment() const
        const vector[GgufKeyValue]& metadata() const
        const vector[GgufTensor]& tensors() const
        const GgufTensor* find_tensor(string_view name) const
        ByteSpan data(const GgufTensor& tensor) except +translate_error

cdef extern from "gguf/metadata.h" namespace "v100" nogil:
    cdef cppclass MetadataOverrides:
        pass

cdef extern from "model/hyperparameters.h" namespace "v100" nogil:
    cdef enum class PoolingType(int32_t):
        none, mean, cls, last, rank
    cdef cppclass Hyperparameters:
        string architecture
        int32_t context_length
        int32_t hidden
        int32_t layers
        int32_t experts
        int32_t vocab
        PoolingType pooling
        int32_t labels

cdef extern from "model/rope.h" namespace "v100" nogil:
    cdef cppclass RopeSettings:
        optional[string] scaling_type
        optional[double] freq_base
        optional[double] freq_scale
        optional[int32_t] original_context
        optional[double] yarn_ext_factor
        optional[double] yarn_attn_factor
        optional[double] yarn_beta_fast
        optional[double] yarn_beta_slow

cdef extern from "model/model.h" namespace "v100" nogil:
    cdef cppclass Classifier:
        pass
    cdef cppclass TextModel:
        const Hyperparameters& hyperparameters() const
        const Classifier* classifier() const
        bool is_recurrent() except +translate_error
        int32_t loaded_mtp_blocks() const
        int32_t sliding_window() const

cdef extern from "ops/ops.h" namespace "v100" nogil:
    cdef cppclass Backend:
        string_view name() const

cdef extern from "parallel/placement.h" namespace "v100" nogil:
    cdef cppclass TensorOverride:
        string pattern
        string device
    cdef cppclass PlacementParams:
        vector[string] devices
        string split_mode
        vector[double] shares
        int32_t main_device
        vector[TensorOverride] overrides
        optional[int32_t] device_layers
    cdef cppclass Placement:
        const vector[string]& devices() const
        optional[int32_t] rank_of(int32_t layer) const
    vector[string] available_devices()

cdef extern from "cuda/device.h" namespace "v100::cuda" nogil:
    cdef cppclass DeviceInfo:
        string name
        string pci_bus_id
        int32_t multiprocessors
        size_t total_bytes
        bool has_ecc
        vector[int32_t] peers
        string device_name() const
        string capability() const

cdef extern from "cuda/status.h" namespace "v100::cuda" nogil:
    string kernels_text()
    cdef cppclass CudaStatusEntry "v100::cuda::Status::Entry":
        DeviceInfo info
        size_t free_bytes
        string problem
    cdef cppclass CudaStatus "v100::cuda::Status":
        string kernels
        string driver
        bool has_driver
        vector[CudaStatusEntry] devices
    CudaStatus cuda_status "v100::cuda::status"()

cdef extern from "parallel/collective.h" namespace "v100" nogil:
    cdef cppclass InjectedFault:
        int32_t rank
        int64_t at
        double hang_seconds

cdef extern from "engine/loaded_model.h" namespace "v100" nogil:
    cdef cppclass ModelParams:
        string path
        int32_t n_threads
        bool check_tensors
        string drafter
        string mtp_file
        bool load_mtp
        MetadataOverrides kv_overrides
        string isa
        PlacementParams placement
    cdef cppclass LoadedModel:
        LoadedModel(const ModelParams& params) except +translate_error
        const Placement& placement() const
        const vector[size_t]& rank_bytes() const
        const GgufFile& file() const
        const Backend& backend() const
        const TextModel& text() const
        int64_t n_params() const
        uint64_t size_bytes() const
        string file_type_label() except +translate_error
        string description() except +translate_error
    vector[string] available_isas()

cdef extern from "engine/memory_needs.h" namespace "v100" nogil:
    cdef cppclass RankNeeds:
        string device
        size_t weights, kv, states, compute
    cdef cppclass MemoryNeeds:
        MemoryNeeds(const ModelParams& params) except +translate_error
        const Hyperparameters& hyperparameters() const
        vector[RankNeeds] of "of"(const PlacementParams& placement, const EngineParams& engine) except +translate_error

cdef extern from "engine/lora_adapter.h" namespace "v100" nogil:
    cdef cppclass LoraAdapter:
        const string& task_name() const
        const string& prompt_prefix() const

cdef extern from "engine/control_vector.h" namespace "v100" nogil:
    cdef cppclass ControlVectorFile:
        string path
        float scale
    cdef cppclass ControlVector:
        pass

cdef extern from "sampling/dry.h" namespace "v100" nogil:
    cdef cppclass DryBreaker:
        int32_t head
        vector[int32_t] tail
    cdef cppclass DryBreakers:
        pass
    cdef cppclass DryParams:
        float multiplier
        float base
        int32_t allowed_length
        int32_t last_n

cdef extern from "sampling/infill.h" namespace "v100" nogil:
    cdef cppclass InfillVocabulary:
        int32_t size() const

cdef extern from "sampling/sampler.h" namespace "v100" nogil:
    cdef enum class SamplerStage:
        penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature, infill, adaptive_p
    cdef cppclass TokenBias:
        int32_t token
        float bias
    cdef cppclass TokenProbability:
        int32_t token
        float value
    cdef cppclass SamplerParams:
        uint32_t seed
        float temperature
        float dynatemp_range
        float dynatemp_exponent
        int32_t top_k
        float top_p
        float min_p
        float top_n_sigma
        float typical_p
        float xtc_probability
        float xtc_threshold
        int32_t min_keep
        int32_t repeat_last_n
        float repeat_penalty
        float presence_penalty
        float frequency_penalty
        DryParams dry
        shared_ptr[const DryBreakers] dry_breakers
        shared_ptr[const InfillVocabulary] infill_vocabulary
        int32_t mirostat
        float mirostat_tau
        float mirostat_eta
        float adaptive_target
        float adaptive_decay
        vector[TokenBias] logit_bias
        vector[SamplerStage] stages
    cdef cppclass Sampler:
        Sampler(int32_t n_vocab, SamplerParams params) except +translate_error
        Sampler(const Sampler& other) except +translate_error
        int32_t n_vocab() const
        uint32_t seed() const
        void accept(TokenSpan tokens) except +translate_error
        void set_mask(MaskSpan mask) except +translate_error
        int32_t sample(FloatSpan logits) except +translate_error
        vector[TokenProbability] candidates() except +translate_error
        void reset() except +translate_error
    double log_sum_exp(FloatSpan logits) except +translate_error

cdef extern from "sampling/verification.h" namespace "v100" nogil:
    ctypedef vector[TokenProbability] Proposal
    cdef cppclass ProposalSpan "std::span<const v100::Proposal>":
        ProposalSpan()
        ProposalSpan(Proposal* data, size_t size)
    cdef cppclass SyntheticAcceptance:
        pass

cdef extern from "ops/observed.h" namespace "v100" nogil:
    cdef cppclass InputSums:
        int32_t matrices
        int32_t features
        vector[double] squares
        vector[int64_t] n_rows
    ctypedef map[string, InputSums] InputStatistics

cdef extern from "engine/hidden_pool.h" namespace "v100" nogil:
    cdef cppclass HiddenPool:
        PoolingType type() const
        int32_t hidden() const
        int32_t n_tokens() const
        bool is_complete() const
        vector[float] values() except +translate_error

cdef extern from "memory/prefix_memory.h" namespace "v100" nogil:
    cdef cppclass PrefixReuse:
        int32_t length
        int32_t matched
        string_view source
        int32_t checkpoint
        string_view limit
        int32_t moved
    cdef cppclass CacheUsage:
        int64_t budget
        int64_t used
        int64_t kv_bytes
        int64_t checkpoint_bytes
        int64_t n_nodes
        int64_t n_checkpoints
        int64_t n_evicted

cdef extern from "model/dflash.h" namespace "v100" nogil:
    cdef cppclass DraftLattice:
        int32_t rows
        int32_t candidates
        vector[int32_t] tokens
        vector[float] scores
        vector[float] confidences

cdef extern from "engine/engine.h" namespace "v100" nogil:
    cdef cppclass BlockWork:
        int32_t sequence
        int32_t last
    cdef cppclass BlockWorkSpan "std::span<const v100::BlockWork>":
        BlockWorkSpan()
        BlockWorkSpan(BlockWork* data, size_t size)
    cdef cppclass EmbeddingWork:
        int32_t sequence
        TokenSpan tokens
        HiddenPool* pool
        bool ends
    cdef cppclass EmbeddingWorkSpan "std::span<const v100::EmbeddingWork>":
        EmbeddingWorkSpan()
        EmbeddingWorkSpan(EmbeddingWork* data, size_t size)
    cdef cppclass ThreadSettings:
        vector[vector[int32_t]] cpus
        int32_t priority
        int32_t poll
    cdef cppclass EngineParams:
        int32_t n_ctx
        int32_t n_seq_max
        int32_t n_batch
        int32_t n_ubatch
        int32_t n_threads
        int32_t n_threads_batch
        ThreadSettings threads
        string type_k
        string type_v
        RopeSettings rope
        int64_t cache_bytes
        int32_t n_checkpoints
        bool kv_on_host
        bool swa_full
        bool collect_importance
        vector[shared_ptr[const LoraAdapter]] adapters
        shared_ptr[const ControlVector] control
    cdef cppclass SequenceWork:
        int32_t sequence
        TokenSpan tokens
        Sampler* sampler
        int32_t n_probs
        bool post_sampling_probs
        vector[float]* logits
        TokenSpan draft
        ProposalSpan proposals
        TokenSpan ends
        SyntheticAcceptance* synthetic
        MaskSpan masks
    cdef cppclass WorkSpan "std::span<const v100::SequenceWork>":
        WorkSpan()
        WorkSpan(SequenceWork* data, size_t size)
    cdef cppclass StepOutput:
        int32_t sequence
        int32_t token
        float logprob
        vector[TokenProbability] top
    StepOutput draw_token(int32_t sequence, Sampler& sampler, FloatSpan logits, int32_t n_probs,
                          bool post_sampling_probs) except +translate_error
    cdef cppclass Engine:
        Engine(shared_ptr[const LoadedModel] model, const EngineParams& params) except +translate_error
        int32_t n_ctx() const
        int32_t n_seq_max() const
        int32_t n_batch() const
        int32_t n_ubatch() const
        size_t kv_bytes() const
        bool needs_checkpoints() const
        vector[StepOutput] step(WorkSpan work, int32_t n_passes) except +translate_error
        void embed(EmbeddingWorkSpan work) except +translate_error
        vector[DraftLattice] draft_blocks(BlockWorkSpan work, int32_t n_draft) except +translate_error
        void decode(TokenSpan tokens, TokenSpan sequences, FlagSpan wanted) except +translate_error
        FloatSpan logits() const
        int32_t logits_rows() const
        int32_t length(int32_t sequence) except +translate_error
        bool can_append(int32_t sequence, int32_t n_tokens) except +translate_error
        int32_t free_tokens() except +translate_error
        void truncate(int32_t sequence, int32_t length) except +translate_error
        void fork(int32_t source, int32_t destination, int32_t length) except +translate_error
        void clear(int32_t sequence) except +translate_error
        void pretend(int32_t sequence, int32_t n_tokens) except +translate_error
        bool can_shift() except +translate_error
        void shift(int32_t sequence, int32_t n_keep, int32_t n_discard) except +translate_error

        void set_adapters(int32_t sequence, FloatSpan scales) except +translate_error
        vector[float] adapters(int32_t sequence) except +translate_error
        PrefixReuse reuse_prefix(int32_t sequence, TokenSpan tokens, int32_t most,
                                 FloatSpan scales, int32_t least_chunk) except +translate_error
        void checkpoint(int32_t sequence) except +translate_error
        void release(int32_t sequence) except +translate_error
        CacheUsage cache_usage() except +translate_error
        vector[byte] save_sequence(int32_t sequence) except +translate_error
        void load_sequence(int32_t sequence, ByteSpan state) except +translate_error
        InputStatistics importance() except +translate_error
        void inject(InjectedFault fault, optional[double] stall_seconds) except +translate_error

cdef extern from "speculative/speculator.h" namespace "v100" nogil:
    cdef cppclass DraftChainParams:
        int32_t n_max
        int32_t n_min
        float p_min
        bool samples
    cdef cppclass NgramSizes:
        int32_t n
        int32_t m
    cdef cppclass NgramModParams:
        int32_t n_match
        int32_t n_min
        int32_t n_max
    cdef cppclass SpeculationParams:
        vector[string] types
        DraftChainParams chain
        NgramSizes simple
        NgramSizes map_k
        NgramSizes map_k4v
        int32_t map_k_min_hits
        int32_t map_k4v_min_hits
        NgramModParams mod
        string lookup_static
        string lookup_dynamic
    cdef cppclass Draft:
        vector[int32_t] tokens
        vector[Proposal] proposals
    cdef cppclass DraftOrder:
        int32_t sequence
        int32_t last
        int32_t most
        float temperature
        uint32_t seed
    cdef cppclass DraftOrderSpan "std::span<const v100::DraftOrder>":
        DraftOrderSpan()
        DraftOrderSpan(DraftOrder* data, size_t size)
    cdef cppclass DrafterStatistics:
        string name
        int64_t n_begins
        int64_t n_draft_calls
        int64_t n_accept_calls
        int64_t n_drafts
        int64_t n_accepted_drafts
        int64_t n_tokens
        int64_t n_accepted_tokens
        vector[int64_t] accepted_at
        double begin_ms
        double draft_ms
        double accept_ms
    cdef cppclass Speculator:
        vector[string] names() except +translate_error
        int32_t longest() except +translate_error
        void begin(int32_t sequence) except +translate_error
        void follow(int32_t sequence) except +translate_error
        vector[Draft] draft(DraftOrderSpan orders) except +translate_error
        void accept(int32_t sequence, int32_t n_verified, int32_t n_accepted) except +translate_error
        void forget(int32_t sequence) except +translate_error
        void save() except +translate_error
        vector[DrafterStatistics] statistics() except +translate_error
    span[const string_view] speculation_types()

# Small bridges for what Cython cannot spell: variants, construction behind a smart pointer.
cdef extern from "native_bridge.h" namespace "v100" nogil:
    const char* version_text()
    const char* compiler_text()
    const char* commit_text()
    int build_number()
    uint64_t value_u64(const GgufValue& value)
    int64_t value_i64(const GgufValue& value)
    double value_f64(const GgufValue& value)
    bool value_bool(const GgufValue& value)
    string_view value_string(const GgufValue& value)
    const GgufArray& value_array(const GgufValue& value)
    string_view view_of(const string& text)
    QuantType quant_type_or_none(const string& name, bool& known)
    void override_int(MetadataOverrides& overrides, const string& key, int64_t value) except +translate_error
    void override_float(MetadataOverrides& overrides, const string& key, double value) except +translate_error
    void override_bool(MetadataOverrides& overrides, const string& key, bool value) except +translate_error
    void override_string(MetadataOverrides& overrides, const string& key, const string& value) except +translate_error
    shared_ptr[MemoryNeeds] open_memory_needs(const ModelParams& params) except +translate_error
    shared_ptr[const LoadedModel] load_model(const ModelParams& params) except +translate_error
    shared_ptr[const LoraAdapter] load_adapter(shared_ptr[const LoadedModel] model, const string& path,
                                               int32_t n_threads) except +translate_error
    shared_ptr[const ControlVector] load_control_vector(const LoadedModel& model, const vector[ControlVectorFile]& files,
                                                        int32_t first, int32_t last) except +translate_error
    shared_ptr[const DryBreakers] new_dry_breakers(const vector[DryBreaker]& breakers) except +translate_error
    shared_ptr[const InfillVocabulary] new_infill_vocabulary(const vector[string]& texts,
                                                             const vector[int32_t]& end_tokens,
                                                             int32_t end) except +translate_error
    shared_ptr[Sampler] new_sampler(int32_t n_vocab, const SamplerParams& params) except +translate_error
    shared_ptr[Sampler] copy_sampler(const Sampler& other) except +translate_error
    shared_ptr[HiddenPool] new_hidden_pool(PoolingType type, int32_t hidden) except +translate_error
    shared_ptr[Engine] new_engine(shared_ptr[const LoadedModel] model, const EngineParams& params) except +translate_error
    shared_ptr[SyntheticAcceptance] new_synthetic_acceptance(const vector[double]& rates, uint32_t seed) except +translate_error
    shared_ptr[Speculator] new_speculator(shared_ptr[Engine] target, const SpeculationParams& params,
                                          shared_ptr[Engine] draft) except +translate_error
