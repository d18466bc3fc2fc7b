"""Records of failures, which errors carry; they import nothing but each other."""
