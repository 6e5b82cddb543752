"""The order of a graph's ops, as data: times, bytes and dependencies, but no graph and no plan."""
