// The searches of the encoders for any processor, in vectors of 4.
#include "quants/encode_search_lanes.h"

namespace v100 {

constinit const EncodeSearches kGenericSearches = kSearches;

}  // namespace v100
