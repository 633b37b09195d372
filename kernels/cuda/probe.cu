#include "pearl/device/probe_entries.hpp"
