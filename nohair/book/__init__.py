"""Running the chapters and building the site."""
