"""Optional speed: everything here may be deleted and the library still runs."""
