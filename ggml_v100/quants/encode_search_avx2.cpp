// The searches of the encoders for AVX2.
#include "quants/encode_search_lanes.h"

namespace v100 {

constinit const EncodeSearches kAvx2Searches = kSearches;

}  // namespace v100
