#include "pearl/device/gae_entries.hpp"
