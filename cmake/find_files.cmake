# Sets `name` to the files in `folder` that match the patterns after it. A folder's own name may hold characters that
# file(GLOB) takes for a pattern, as in "pearl [fork]": it would find nothing there.
function(find_files name folder)
  string(REGEX REPLACE "([[*?])" "[\\1]" folder "${folder}")
  list(TRANSFORM ARGN PREPEND "${folder}/" OUTPUT_VARIABLE patterns)
  file(GLOB found CONFIGURE_DEPENDS ${patterns})
  set(${name} "${found}" PARENT_SCOPE)
endfunction()
