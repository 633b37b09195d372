"""Tools for maintainers: wheels, releases, and pages of the documentation. No wheel contains them."""
