#include "pearl/device/column_store_entries.hpp"
