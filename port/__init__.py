"""The room for ports of differential attention."""
