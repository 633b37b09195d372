#include "pearl/device/learner_entries.hpp"
