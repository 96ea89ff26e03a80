// The searches of the encoders for AVX-512.
#include "quants/encode_search_lanes.h"

namespace v100 {

constinit const EncodeSearches kAvx512Searches = kSearches;

}  // namespace v100
